"""Why a rank failed, as ranks send it to each other, and the one error that all of them raise.

In: exceptions by rank, and ranks that were missing. Out: one error for the caller: of the exceptions' own
type where they have the same, else a :class:`~pannier.client.ranks.load_error.LoadError`. What ranks send is
JSON of a bounded size: the type's name, the kind, and the beginning of the message; the exception itself
stays on its own rank. Pure.
"""

import socket
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from traceback import StackSummary
from typing import Any, Final

from pannier.client.ranks.load_error import LoadError
from pannier.client.ranks.store_barrier import Missing, Step
from pannier.v1 import save_pb2
from pannier.wire import errors
from pannier.wire.errors import PannierError
from pannier.wire.failures import ranks_text, shorten

_SHOWN = 4
_MESSAGE_BYTES: Final = 2 << 10
"""Of a message that is sent."""
_MESSAGES_BYTES: Final = 512 << 10
"""Of the messages of all ranks in one outcome."""
_LEAST_MESSAGE_BYTES: Final = 128


@dataclass(frozen=True)
class Problem:
    """Why one rank failed."""

    message: str
    host: str
    kind: save_pb2.FailureKind
    type: str = ""
    """Name of the exception's class; empty: none was raised."""

    @classmethod
    def of(cls, error: BaseException) -> "Problem":
        """The problem that an exception is."""
        return cls(
            message=str(error) if isinstance(error, PannierError) else _described(error),
            host=socket.gethostname(),
            kind=save_pb2.FAILURE_KIND_CLIENT,
            type=type(error).__name__,
        )

    def error(self) -> PannierError:
        """An exception with the message, of the same type if it is one of Pannier's."""
        try:
            return errors.rebuild(self.type, self.message)
        except TypeError:  # a subclass of the user's, with arguments of its own
            return PannierError(self.message)

    @property
    def is_lost(self) -> bool:
        """Whether the rank failed since another one was lost."""
        return self.kind == save_pb2.FAILURE_KIND_LOST

    def to_json(self, most: int = _MESSAGE_BYTES) -> dict[str, Any]:
        """For other ranks, with up to ``most`` bytes of the message."""
        return {**asdict(self), "message": _cut(self.message, most)}


def lost(message: str) -> Problem:
    """Of a rank whose exchange with another one broke off."""
    return Problem(message, socket.gethostname(), save_pb2.FAILURE_KIND_LOST)


@dataclass(frozen=True)
class Failed:
    """The outcome of a step that failed, for all ranks."""

    problems: Mapping[int, Problem]
    """By global rank."""
    message: str = ""
    """Instead of the problems' messages."""
    is_absence: bool = False
    """Whether ranks did not come, and none failed by itself."""

    def error(self, own: Mapping[int, BaseException]) -> PannierError:
        """The error to raise.

        Args:
            own: this rank's exception itself, if it failed.
        """
        causes = {
            rank: (own[rank], traceback.extract_tb(own[rank].__traceback__))
            if rank in own
            else (problem.error(), StackSummary())
            for rank, problem in self.problems.items()
        }
        return _combined(self.problems, causes, self.message)

    def first_cause(self, own: Mapping[int, BaseException]) -> BaseException | None:
        """The exception of the lowest rank that failed by one."""
        raised = [rank for rank, problem in self.problems.items() if problem.type or rank in own]
        if not raised:
            return None
        return own.get(min(raised)) or self.problems[min(raised)].error()

    def to_json(self) -> dict[str, Any]:
        """For other ranks."""
        most = max(_LEAST_MESSAGE_BYTES, _MESSAGES_BYTES // max(1, len(self.problems)))
        problems = {
            str(rank): each.to_json(min(_MESSAGE_BYTES, most))
            for rank, each in self.problems.items()
        }
        message = _cut(self.message, _MESSAGE_BYTES)
        return {"problems": problems, "message": message, "is_absence": self.is_absence}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Failed":
        """What another rank has sent."""
        problems = {int(rank): Problem(**each) for rank, each in content["problems"].items()}
        return cls(problems, content["message"], content["is_absence"])


def error_to_json(error: PannierError) -> dict[str, Any]:
    """An error that all ranks raise as it is, for other ranks."""
    return {"type": type(error).__name__, "message": _cut(str(error), _MESSAGE_BYTES)}


def failed_without(
    load: str, step: Step, missing: Missing, problems: Mapping[int, Problem]
) -> Failed:
    """The outcome of a step to which ranks did not come.

    Args:
        load: its description.
        problems: of ranks that came.
    """
    causes = {rank: each for rank, each in problems.items() if not each.is_lost}
    if causes:
        return Failed(causes)
    absent = {
        rank: Problem(
            f"{missing.dead[rank]}: it was waited for {step.action}"
            if rank in missing.dead
            else f"was waited for {step.action} for {missing.waited_s:.0f} s",
            missing.hosts.get(rank, ""),
            save_pb2.FAILURE_KIND_LOST if rank in missing.dead else save_pb2.FAILURE_KIND_DEADLINE,
        )
        for rank in missing.ranks
    }
    dead = [f"rank {rank}: {text}" for rank, text in missing.dead.items()]
    message = (
        f"{load}: after {missing.waited_s:.0f} s still waiting for {missing.text} {step.action}"
    )
    if dead:
        message += f"; {shorten(dead, _SHOWN, separator='; ')}"
    broken = sorted({each.message for each in problems.values()})
    if broken:
        message += f"; {shorten(broken, _SHOWN, separator='; ')}"
    return Failed(absent, message, is_absence=True)


def _combined(
    problems: Mapping[int, Problem],
    causes: Mapping[int, tuple[BaseException, StackSummary]],
    message: str,
) -> PannierError:
    """One error for those of several ranks, of their type if they have the same."""
    texts = {rank: problem.message for rank, problem in problems.items()}
    failures = [
        save_pb2.Failure(
            rank=rank, host=problems[rank].host, kind=problems[rank].kind, message=texts[rank]
        )
        for rank in sorted(problems)
    ]
    if message:
        return LoadError(message, failures, causes)
    if len(set(texts.values())) == 1:
        message = f"{ranks_text(sorted(texts))}: {next(iter(texts.values()))}"
    else:
        shown = [f"rank {rank}: {texts[rank]}" for rank in sorted(texts)]
        message = shorten(shown, _SHOWN, separator="; ")
    types = {type(problem.error()) for problem in problems.values()}
    common = types.pop() if len(types) == 1 else LoadError
    # PannierError itself stands for exceptions that aren't Pannier's.
    if common is not PannierError and not issubclass(common, errors.LoadError):
        return common(message, failures)
    return LoadError(message, failures, causes)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cut(text: str, most: int) -> str:
    """The first ``most`` bytes of a text, and how much more there is."""
    content = text.encode(errors="replace")
    if len(content) <= most:
        return text
    shown = content[:most].decode(errors="ignore")
    return f"{shown} ... ({len(content) - most} more bytes, which that rank's own error has)"
