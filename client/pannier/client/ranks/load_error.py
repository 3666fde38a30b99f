"""``LoadError``: why a load failed, by rank, for code that catches Pannier's errors or torch's.

In: a message, and each rank's failure with its exception. Out: an ordinary exception that is both a
``PannierError`` and torch's ``CheckpointException``.
"""

from collections.abc import Iterable, Mapping
from traceback import StackSummary

from torch.distributed.checkpoint.api import CheckpointException

from pannier.v1 import save_pb2
from pannier.wire import errors


class RankFailure(tuple[BaseException, StackSummary]):
    """Why one rank failed: ``rank``, ``host``, ``kind`` and ``message``, as in any PannierError.

    Also torch's pair of the exception and its stack. Pickling keeps only the text, since an exception
    may refer to anything.
    """

    _failure: errors.Failure

    def __new__(
        cls, failure: errors.Failure, cause: tuple[BaseException, StackSummary] | None = None
    ) -> "RankFailure":
        """``cause``: the exception and its stack; default: the message alone."""
        pair = cause or (errors.PannierError(failure.message), StackSummary())
        made = super().__new__(cls, pair)
        made._failure = failure
        return made

    @property
    def rank(self) -> int:
        """Global rank."""
        return self._failure.rank

    @property
    def host(self) -> str:
        """The host that reported it."""
        return self._failure.host

    @property
    def kind(self) -> str:
        """The kind of the failure."""
        return self._failure.kind

    @property
    def message(self) -> str:
        """What happened, with which value, and what to do."""
        return self._failure.message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._failure,)


class LoadError(errors.LoadError, CheckpointException):
    """A checkpoint could not be loaded; ``failures`` has the reasons by global rank.

    Args:
        message: what happened, on which ranks.
        failures: one for each rank that failed.
        causes: by rank, the exceptions and their stacks, if known.
    """

    # Replaces CheckpointException's property, which can't be set.
    failures: Mapping[int, RankFailure] = {}  # type: ignore[assignment]

    def __init__(
        self,
        message: str,
        failures: Iterable[save_pb2.Failure] = (),
        causes: Mapping[int, tuple[BaseException, StackSummary]] | None = None,
    ) -> None:
        messages = [*failures]
        super().__init__(message, messages)
        known = causes or {}
        self.failures = {
            each.rank: RankFailure(errors.Failure.of(each), known.get(each.rank))
            for each in messages
        }

    def __str__(self) -> str:
        # CheckpointException's shows stacks instead of the message.
        return Exception.__str__(self)
