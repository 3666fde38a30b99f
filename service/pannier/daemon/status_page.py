"""The status page and the JSON that it reads: the Status service's data, over HTTP.

In: a status registry and the daemon's own state. Out: routes for :mod:`pannier.daemon.http_server`.
``/status.json`` is ListSavesResponse without ranks, ``/save.json?id=`` is GetSaveResponse with all of
them, ``/load.json?id=`` is GetLoadResponse, in the form of ``pannier status --json``. Statuses are cached,
those of ended saves for good, so that many viewers cost a daemon no more than one. Called by any thread.
"""

import asyncio
import base64
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import TimeoutError as LateError
from html import escape
from importlib import resources
from typing import Any, Final, TypeVar

from google.protobuf import message

from pannier.common import timeouts
from pannier.common.message_json import as_dict
from pannier.daemon.http_server import Request, Response, Route
from pannier.daemon.metrics import Metrics
from pannier.daemon.status_registry import TERMINAL, StatusRegistry, UnknownSaveError
from pannier.daemon.status_service import DaemonInfo, describe_daemon
from pannier.v1 import save_pb2, status_pb2
from pannier.wire.errors import InvalidRequestError, UnavailableError

_DEFAULT_LIMIT: Final = 50
_MAX_LIMIT: Final = 500
_MAX_ENDED: Final = 1024

_Result = TypeVar("_Result")

StateReader = Callable[[Callable[[], Any]], Any]
"""Calls a function where the state of saves may be read, and returns its result."""


def read_on_loop(loop: asyncio.AbstractEventLoop) -> StateReader:
    """A :data:`StateReader` for any thread but the loop's own."""

    def read_state(function: Callable[[], _Result]) -> _Result:
        async def run() -> _Result:
            return function()

        turn = asyncio.run_coroutine_threadsafe(run(), loop)
        try:
            return turn.result(timeouts.LOOP_S)
        except LateError as error:
            turn.cancel()
            raise UnavailableError(
                f"the daemon's event loop did not respond within {timeouts.LOOP_S:.0f} s"
            ) from error

    return read_state


class StatusPage:
    """The status page of one daemon. Called by any thread."""

    def __init__(
        self,
        status_registry: StatusRegistry,
        daemon_info: DaemonInfo,
        read_state: StateReader,
    ) -> None:
        self._status_registry = status_registry
        self._daemon_info = daemon_info
        self._read_state = read_state
        self._lock = threading.Lock()
        """Held while a status is rendered, so that other threads use the result."""
        self._ended: OrderedDict[str, save_pb2.SaveStatus] = OrderedDict()
        """Final statuses by key, without ranks."""
        self._cached: dict[str, tuple[float, save_pb2.SaveStatus]] = {}
        """Cached statuses by key, each with its expiry on the monotonic clock."""

    def routes(self, metrics: Metrics) -> dict[str, Route]:
        """The functions of all paths."""
        return {
            "/": page,
            "/status.json": self._status,
            "/save.json": self._save,
            "/load.json": self._load,
            "/metrics": metrics.respond,
        }

    def _status(self, request: Request) -> Response:
        limit = requested_limit(request)

        def read() -> status_pb2.ListSavesResponse:
            described = describe_daemon(self._daemon_info)
            described.loads.extend(self._daemon_info.loads.list(limit=limit))
            return described

        response: status_pb2.ListSavesResponse = self._read_state(read)
        for key in self._status_registry.newest(limit):
            brief = self._brief(key)
            if brief is not None:
                response.saves.append(brief)
        return json_response(response)

    def _save(self, request: Request) -> Response:
        key = self._status_registry.find(request.query.get("id", ""))
        with self._lock:
            return json_response(status_pb2.GetSaveResponse(save=self._rendered(key)))

    def _load(self, request: Request) -> Response:
        name = request.query.get("id", "")
        load = self._read_state(lambda: self._daemon_info.loads.get(name))
        return json_response(status_pb2.GetLoadResponse(load=load))

    def _brief(self, key: str) -> save_pb2.SaveStatus | None:
        """The status without ranks; None when the save was just removed."""
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
                while len(self._ended) > _MAX_ENDED:
                    self._ended.popitem(last=False)
            return brief

    def _rendered(self, key: str) -> save_pb2.SaveStatus:
        """The status, cached for a short time; called with the lock held."""
        now = time.monotonic()
        until, status = self._cached.get(key, (0.0, None))
        if status is not None and now < until:
            return status
        made: save_pb2.SaveStatus = self._read_state(lambda: self._status_registry.get(key))
        took = time.monotonic() - now
        self._cached = {k: v for k, v in self._cached.items() if v[0] > now}
        self._cached[key] = (time.monotonic() + max(timeouts.STATUS_CACHED_S, 10 * took), made)
        return made


def page(request: Request) -> Response:
    """The page itself, the same for each daemon."""
    return _PAGE


def requested_limit(request: Request) -> int:
    """The most saves that ``/status.json`` is to have. Raises InvalidRequestError."""
    text = request.query.get("limit", str(_DEFAULT_LIMIT))
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:9]) <= _MAX_LIMIT:
        raise InvalidRequestError(f"limit={text!r} is not a number from 1 to {_MAX_LIMIT}")
    return int(text)


def json_response(value: message.Message) -> Response:
    """A message as :func:`as_dict` renders it."""
    return Response(json.dumps(as_dict(value)).encode(), "application/json")


def _words() -> str:
    """The protos' names of phases, in their order, and of states that are final."""
    phases = [each.name for each in save_pb2.RankPhase.DESCRIPTOR.values if each.number]
    return json.dumps(
        {
            "phases": [name.removeprefix("RANK_PHASE_") for name in phases],
            "terminal": [
                save_pb2.SaveState.Name(state).removeprefix("SAVE_STATE_") for state in TERMINAL
            ],
        }
    )


def _source(content: str) -> str:
    """An inline element's content as a source of the Content-Security-Policy."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _load() -> Response:
    directory = resources.files("pannier.daemon") / "page"
    html, style, picture, loads, script = (
        (directory / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "picture.js", "loads.js", "page.js")
    )
    script = f'"use strict";\n{picture}\n{loads}\n{script}'
    html = html.replace("{}", escape(_words()))
    html = html.replace("/* page.css */", style).replace(
        "/* picture.js, loads.js, page.js */", script
    )
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(html.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": policy})


_PAGE: Final = _load()
