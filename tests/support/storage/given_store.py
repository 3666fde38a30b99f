"""The store that ``make test-store URL=...`` names, for the tests that any store must pass.

Its endpoint and credentials are those of the environment. Each test has a new directory below the URL, which
is removed with all that is in it.
"""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pannier.common.locations import parse
from pannier.storage import Store, open_store

URL: Final = os.environ.get("STORE_URL", "").rstrip("/")
"""Empty: the tests run on the doubles."""


def options() -> dict[str, Any]:
    """Storage options, as daemons take them from the environment."""
    given: dict[str, Any] = json.loads(os.environ.get("PANNIER_STORAGE_OPTIONS", "{}"))
    return given


@contextmanager
def new_directory() -> Iterator[str]:
    """URL of a directory that is removed afterwards."""
    url = f"{URL}/{uuid.uuid4().hex}"
    try:
        yield url
    finally:
        asyncio.run(_remove(url))


async def _remove(url: str) -> None:
    location = parse(url)
    if location.scheme == "file":
        shutil.rmtree(location.path, ignore_errors=True)
        return
    store = open_store(url, storage_options=options())
    try:
        await remove_all(store)
    finally:
        await store.close()


async def remove_all(store: Store) -> None:
    """Removes all objects and unfinished uploads."""
    for info in await store.list():
        await store.delete(info.key)
    for item in await store.list_unfinished():
        await store.discard(item)
