"""What a daemon serves over HTTP, as a test reads it."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from support.processes.stretch import BOUND_S

_T = TypeVar("_T")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Response:
    """Status, headers and body of an answer, whatever it is."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def get(address: str, path: str, headers: Mapping[str, str] = {}, method: str = "GET") -> Response:
    """Asks ``host:port``."""
    request = urllib.request.Request(
        f"http://{address}{path}", headers=dict(headers), method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
            return Response(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, error.headers, error.read())


class Scrape:
    """The result of one scrape of ``host:port``."""

    def __init__(self, address: str) -> None:
        answer = get(address, "/metrics")
        assert answer.status == 200, answer.text
        self.families = {each.name: each for each in text_string_to_metric_families(answer.text)}
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    @property
    def names(self) -> set[str]:
        """Of all series, as a query has them."""
        return {name for name, _ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with these labels."""
        return self.samples[(name, frozenset(labels.items()))]

    def labels(self, name: str) -> list[dict[str, str]]:
        """Of all series of that name."""
        return [dict(labels) for each, labels in self.samples if each == name]


def until(get: Callable[[], _T], condition: Callable[[_T], bool], timeout: float = BOUND_S) -> _T:
    """The first that meets the condition; raises AssertionError when none has at the deadline."""
    deadline = time.monotonic() + timeout
    while not condition(last := get()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {last!r}"
        time.sleep(0.05)
    return last
