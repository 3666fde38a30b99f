"""The store that a command reads. In: a place, ``--timeout``. Out: its store, once it has answered.

A command has a person who waits for it: a store that is down is named after two seconds and given up soon,
where daemons go on trying.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import click

from pannier.cli import output
from pannier.cli.options import Seconds, combined, storage_options
from pannier.common import timeouts
from pannier.storage import open_store
from pannier.storage.base import DeniedError, NotFoundError, Store, limited
from pannier.wire import object_names

_TIMEOUT: Final = "pannier.storage_timeout"


def _keep(context: click.Context, _: click.Parameter, value: float) -> None:
    context.meta[_TIMEOUT] = value


store_options = combined(
    storage_options,
    click.option(
        "--timeout",
        type=Seconds(),
        default=timeouts.STORAGE_CONTACT_S,
        show_default=True,
        metavar="SECONDS",
        expose_value=False,
        callback=_keep,
        help="Longest wait for storage's first answer.",
    ),
)
"""For commands that call :func:`open_answering`."""


@asynccontextmanager
async def open_answering(url: str, options: Mapping[str, Any]) -> AsyncIterator[Store]:
    """The store of a place, which is closed at the end.

    Raises StorageError, with its last answer, when it gives none but temporary errors for ``--timeout``.
    """
    store = open_store(url, storage_options=options)
    try:
        await _await_answer(store, click.get_current_context().meta[_TIMEOUT])
        yield store
    finally:
        await store.close()


async def _await_answer(store: Store, timeout_s: float) -> None:
    end, problem = time.monotonic() + timeout_s, "no answer"

    def note(reason: str) -> None:
        nonlocal problem
        problem = reason

    def say() -> None:
        wait = f"waiting for {store.url}, up to {timeout_s:g} s (--timeout)"
        output.say(f"{wait}: {problem}", err=True)

    line = asyncio.get_running_loop().call_later(timeouts.WAIT_WARNING_S, say)
    try:
        with limited(until=lambda: end, retried=note):
            await store.stat(object_names.probe(uuid.uuid4().hex))
    except (DeniedError, NotFoundError):
        pass  # The command's own requests show whether that matters.
    finally:
        line.cancel()
