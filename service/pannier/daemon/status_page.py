"""The status page and what it reads: the Status service's data as JSON, over HTTP.

In: a status_registry and what a daemon says of itself. Out: routes for :mod:`pannier.daemon.http_server`.
``/status.json`` is ListSavesResponse without ranks, ``/save.json?id=`` is GetSaveResponse with all of
them, in the form of ``pannier status --json``. Many viewers cost a daemon no more than one: what
doesn't change is kept, and what does is rendered again no sooner than a while after it last was.
"""

import asyncio
import base64
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import TimeoutError as LateError
from importlib import resources
from typing import Any, Final, TypeVar

from google.protobuf import json_format, message

from pannier.daemon.http_server import Request, Response, Route
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_registry import TERMINAL, StatusRegistry, UnknownSaveError
from pannier.daemon.status_service import DaemonInfo, about
from pannier.v1 import save_pb2, status_pb2
from pannier.wire.errors import InvalidRequestError, UnavailableError

_LIMIT: Final = 50
_MOST: Final = 500
_FRESH_S: Final = 0.5
"""A status is good for so long, or for ten times what it took to make."""
_KEPT: Final = 1024
_TURN_S: Final = 10.0
"""For the event loop to answer."""

_Answer = TypeVar("_Answer")

StateReader = Callable[[Callable[[], Any]], Any]
"""Runs a function where saves may be looked at, and returns what it returned."""


def read_directly(function: Callable[[], _Answer]) -> _Answer:
    """An :data:`StateReader` for a daemon whose saves any thread may look at."""
    return function()


def read_on_loop(loop: asyncio.AbstractEventLoop) -> StateReader:
    """An :data:`StateReader` for one whose saves belong to an event loop."""

    def read_state(function: Callable[[], _Answer]) -> _Answer:
        async def run() -> _Answer:
            return function()

        turn = asyncio.run_coroutine_threadsafe(run(), loop)
        try:
            return turn.result(_TURN_S)
        except LateError as error:
            turn.cancel()
            raise UnavailableError(
                f"the daemon hasn't answered for {_TURN_S:.0f} s: it is busy, or it hangs"
            ) from error

    return read_state


class StatusPage:
    """Answers of one daemon. Called by any thread."""

    def __init__(
        self,
        status_registry: StatusRegistry,
        daemon_info: DaemonInfo,
        read_state: StateReader = read_directly,
    ) -> None:
        self._status_registry = status_registry
        self._daemon_info = daemon_info
        self._read_state = read_state
        self._lock = threading.Lock()
        """Held while something is rendered: others wait for that instead of asking, too."""
        self._ended: OrderedDict[str, save_pb2.SaveStatus] = OrderedDict()
        """Those that don't change any more, without ranks."""
        self._fresh: dict[str, tuple[float, save_pb2.SaveStatus]] = {}
        """By key, and good until when, on the monotonic clock."""

    def routes(self, metrics: Metrics) -> dict[str, Route]:
        """All paths that are served."""
        return {
            "/": self._page,
            "/status.json": self._status,
            "/save.json": self._save,
            "/metrics": metrics.answer,
        }

    def _page(self, request: Request) -> Response:
        return _PAGE

    def _status(self, request: Request) -> Response:
        text = request.query.get("limit", str(_LIMIT))
        if not text.isascii() or not text.isdecimal() or not 0 < int(text[:9]) <= _MOST:
            raise InvalidRequestError(f"limit={text!r} is not a number from 1 to {_MOST}")
        response = about(self._daemon_info)
        for key in self._status_registry.newest(int(text)):
            brief = self._brief(key)
            if brief is not None:
                response.saves.append(brief)
        return _json(response)

    def _save(self, request: Request) -> Response:
        key = self._status_registry.find(request.query.get("id", ""))
        with self._lock:
            return _json(status_pb2.GetSaveResponse(save=self._rendered(key)))

    def _brief(self, key: str) -> save_pb2.SaveStatus | None:
        """Without ranks; None when it was just forgotten."""
        with self._lock:
            ended = self._ended.get(key)
            if ended is not None:
                return ended
            brief = save_pb2.SaveStatus()
            try:
                brief.CopyFrom(self._rendered(key))
            except UnknownSaveError:
                return None
            del brief.ranks[:]
            if brief.state in TERMINAL:
                self._ended[key] = brief
                while len(self._ended) > _KEPT:
                    self._ended.popitem(last=False)
            return brief

    def _rendered(self, key: str) -> save_pb2.SaveStatus:
        """The status, not older than a moment; with the lock held."""
        now = time.monotonic()
        until, status = self._fresh.get(key, (0.0, None))
        if status is not None and now < until:
            return status
        made: save_pb2.SaveStatus = self._read_state(lambda: self._status_registry.get(key))
        took = time.monotonic() - now
        self._fresh = {k: v for k, v in self._fresh.items() if v[0] > now}
        self._fresh[key] = (time.monotonic() + max(_FRESH_S, 10 * took), made)
        return made


def _json(value: message.Message) -> Response:
    data = json_format.MessageToDict(
        value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return Response(json.dumps(data).encode(), "application/json")


def _hash(html: str, tag: str) -> str:
    """What the browser is told of the one element of this kind: no other runs."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _load() -> Response:
    html = (resources.files("pannier.daemon") / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(html.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": policy})


_PAGE: Final = _load()
