"""What goes wrong on the GCS server, on purpose: rules that match requests and are used up."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Kind = Literal["status", "reset", "delay", "partial", "lost", "corrupt", "answered", "unfinished"]


@dataclass
class Fault:
    """One rule.

    ``status``: answers with ``status`` instead of doing anything.
    ``reset``: closes the connection instead of answering, with nothing done.
    ``delay``: waits ``seconds``, at most until delays are released, then continues.
    ``partial``: keeps the first ``bytes`` of the body, then resets the connection.
    ``lost``: does everything, then resets the connection instead of answering.
    ``corrupt``: flips a bit of the body before it is kept, or of the content that is sent.
    ``answered``: does everything, then answers with ``status`` and ``body`` instead.
    ``unfinished``: takes an upload's last bytes, but answers 308 and makes no object of them yet.
    """

    kind: Kind
    method: str = ""
    """Empty: any."""
    path: str = ""
    """Searched as a regular expression in path and query, as they were sent."""
    content_range: str = ""
    """The same, in the header Content-Range."""
    authorization: str = ""
    """The same, in the header Authorization."""
    security_token: str = ""
    """The same, in the header X-Amz-Security-Token."""
    times: int = 1
    """How many matching requests it befalls; -1: all."""
    skip: int = 0
    """How many matching requests go unharmed first."""
    status: int = 503
    code: str = "SlowDown"
    """Of S3's errors."""
    reason: str = "injected"
    """Of GCS' errors."""
    body: str = ""
    message: str = "injected"
    headers: Mapping[str, str] | None = None
    seconds: float = 0.0
    bytes: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown kind of fault: {self.kind!r}")

    def applies(self, method: str, path: str, **headers: str) -> bool:
        """Whether it befalls this request; counts."""
        if (
            self.times == 0
            or (self.method and self.method != method)
            or not re.search(self.path, path)
            or any(not re.search(getattr(self, name), headers[name]) for name in headers)
        ):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= self.times > 0
        self.hits += 1
        return True


class Faults:
    """The rules of one server, the earliest first."""

    def __init__(self) -> None:
        self.rules: list[Fault] = []

    def add(self, **rule: Any) -> Fault:
        """Adds a rule with the fields of :class:`Fault`."""
        fault = Fault(**rule)
        self.rules.append(fault)
        return fault

    def clear(self) -> None:
        self.rules.clear()

    def end_delays(self) -> None:
        """Delays no request any more."""
        for rule in self.rules:
            if rule.kind == "delay":
                rule.times = 0

    def find(self, method: str, path: str, **headers: str) -> Fault | None:
        """The first rule that befalls this request.

        Args:
            headers: those that a rule may be about, by its field's name; empty when absent.
        """
        return next((rule for rule in self.rules if rule.applies(method, path, **headers)), None)

    def json(self) -> list[dict[str, Any]]:
        return [asdict(rule) for rule in self.rules]
