"""A step whose outcome must be known: run again until storage tells. Event loop only."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import tenacity

from pannier.coordinator.saves.save import Save, State
from pannier.storage import StorageError
from pannier.wire.errors import IntegrityError

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_LONGEST_BACKOFF_S: Final = 5.0
"""Between two tries of a step whose outcome is in doubt."""


async def insist(
    save: Save,
    step: Callable[[], Awaitable[_Answer]],
    *,
    final: tuple[type[StorageError], ...] = (),
) -> _Answer:
    """Runs a step again until its outcome is known; the save is in doubt meanwhile.

    Args:
        final: errors that are an outcome, too.
    """

    def doubt(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        save.problem = f"storage at {save.context.checkpoint_id} ({error})"
        save.move(State.IN_DOUBT)
        _log.warning("the decision of %s is in doubt: %s", save.label, error)
        save.ring()

    tries = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(
            lambda error: (
                isinstance(error, (StorageError, IntegrityError)) and not isinstance(error, final)
            )
        ),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=_LONGEST_BACKOFF_S),
        before_sleep=doubt,
    )

    async def once() -> _Answer:
        return await step()

    answer: _Answer = await tries(once)
    save.problem = ""
    return answer


async def ask(save: Save, step: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Asks storage for what a save needs before anything is decided.

    Of a resumed save only storage knows what became of it, so that it is asked until it answers.
    Of any other, the first error of the step is raised.
    """

    def note(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        save.problem = f"storage at {save.context.checkpoint_id} ({error})"
        _log.warning("%s: storage doesn't tell what it holds of it: %s", save.label, error)
        save.ring()

    tries = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, StorageError) and save.resumed
        ),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=_LONGEST_BACKOFF_S),
        before_sleep=note,
    )

    async def once() -> _Answer:
        return await step()

    answer: _Answer = await tries(once)
    return answer
