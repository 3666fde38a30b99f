"""Steps of a save that are run again until storage answers. Event loop only."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from pannier.common.retry import RetryPolicy
from pannier.coordinator.saves.save import Save, State
from pannier.storage import StorageError
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


async def insist(
    save: Save,
    step: Callable[[], Awaitable[_Answer]],
    *,
    final: tuple[type[StorageError], ...] = (),
) -> _Answer:
    """Runs a step until its outcome is known; the save is IN_DOUBT meanwhile.

    Args:
        final: errors that are an outcome, too.
    """

    def doubt(error: BaseException) -> None:
        save.problem = f"storage at {save.context.checkpoint_id} ({error})"
        save.move(State.IN_DOUBT)
        _log.warning("the decision of %s is in doubt: %s", save.label, error)
        save.ring()

    policy = RetryPolicy(
        retriable=lambda error: (
            isinstance(error, (StorageError, IntegrityError)) and not isinstance(error, final)
        ),
        first_s=_FIRST_PAUSE_S,
        longest_s=_LONGEST_PAUSE_S,
        on_retry=doubt,
    )
    answer = await policy.run(step)
    save.problem = ""
    return answer


async def ask(save: Save, step: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Asks storage for what a save needs before anything is decided.

    For a resumed save only storage knows what became of it: the step is run until it answers. For any
    other save the first error of the step is raised.
    """

    def note(error: BaseException) -> None:
        save.problem = f"storage at {save.context.checkpoint_id} ({error})"
        _log.warning("%s: storage can't be asked for its records: %s", save.label, error)
        save.ring()

    policy = RetryPolicy(
        retriable=lambda error: isinstance(error, StorageError) and save.resumed,
        first_s=_FIRST_PAUSE_S,
        longest_s=_LONGEST_PAUSE_S,
        on_retry=note,
    )
    return await policy.run(step)
