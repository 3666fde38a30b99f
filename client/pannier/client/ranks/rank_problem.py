"""Why a rank failed, as ranks send it to each other, and the one error that all of them raise.

In: exceptions by rank, and ranks that were missing. Out: one error for the caller: of the exceptions' own
type where they have the same, else a :class:`~pannier.client.ranks.load_error.LoadError`. Pure.
"""

import pickle
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import FrameSummary, StackSummary

from pannier.client.ranks.load_error import LoadError
from pannier.client.ranks.store_barrier import Missing, Step
from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError
from pannier.wire.failures import ranks_text, shorten

_SHOWN = 4


@dataclass(frozen=True)
class Problem:
    """Why one rank failed."""

    message: str
    host: str
    kind: save_pb2.FailureKind
    content: bytes = b""
    """The exception, pickled; empty: it can't be."""
    stack: StackSummary | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Problem":
        """The problem that an exception is."""
        message = str(error) if isinstance(error, PannierError) else _described(error)
        return cls(
            message=message,
            host=socket.gethostname(),
            kind=save_pb2.FAILURE_KIND_CLIENT,
            content=_pickled(error),
            stack=_extract_stack(error),
        )

    def error(self) -> BaseException:
        """The exception; one with the message, where it could not be sent."""
        try:
            found = pickle.loads(self.content)
        except Exception:  # noqa: BLE001 - unpickling runs the exception's own code
            return PannierError(self.message)
        return found if isinstance(found, BaseException) else PannierError(self.message)

    @property
    def is_lost(self) -> bool:
        """Whether the rank failed since another one was lost."""
        return self.kind == save_pb2.FAILURE_KIND_LOST


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
            rank: (own.get(rank) or problem.error(), problem.stack or StackSummary())
            for rank, problem in self.problems.items()
        }
        return _combined(self.problems, causes, self.message)

    def first_cause(self, own: Mapping[int, BaseException]) -> BaseException | None:
        """The exception of the lowest rank that failed by one."""
        raised = [rank for rank, problem in self.problems.items() if problem.content or rank in own]
        if not raised:
            return None
        return own.get(min(raised)) or self.problems[min(raised)].error()


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
    types = {type(cause) for cause, _ in causes.values()}
    common = types.pop() if len(types) == 1 else LoadError
    # PannierError itself stands for one that could not be sent.
    if issubclass(common, PannierError) and common not in (PannierError, LoadError):
        return common(message, failures)
    return LoadError(message, failures, causes)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _extract_stack(error: BaseException) -> StackSummary:
    """The stack, which can be pickled: since Python 3.13, extracted frames refer to code objects."""
    frames = traceback.extract_tb(error.__traceback__)
    return StackSummary.from_list(
        [FrameSummary(each.filename, each.lineno, each.name, line=each.line) for each in frames]
    )


def _pickled(error: BaseException) -> bytes:
    """Empty where the exception can't be pickled, or not be made of its pickle."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code
        return b""
    return content
