"""The text that names the ranks a save waits for."""

from pannier.common.message_json import duration
from pannier.common.wait_text import Awaited, training_waits, waiting_on, waiting_text
from pannier.daemon.metrics import ranks_waiting
from pannier.v1 import save_pb2


def test_ranks_are_named_by_host() -> None:
    text = waiting_text(
        [Awaited(7, "node-2", 20.4), Awaited(3, "node-2", 12.2), Awaited(1, "node-0", 0.1)]
    )
    assert text == (
        "rank 1 (host node-0, last seen 0 s ago), ranks [3, 7] (host node-2, last seen 12 s ago)"
    )


def test_a_rank_that_was_never_seen_is_named_as_such() -> None:
    assert waiting_text([Awaited(1)]) == "rank 1 (not seen yet)"
    assert waiting_text([Awaited(1, "node-0")]) == "rank 1 (host node-0, not seen yet)"


def test_ranks_are_not_blamed_for_a_sidecar_that_does_not_respond() -> None:
    text = waiting_text(Awaited(rank, "node-0", 12, no_sidecar=True) for rank in range(2))
    assert text == "ranks [0, 1] (host node-0, whose sidecar does not respond, last seen 12 s ago)"


def test_many_ranks_are_cut() -> None:
    text = waiting_text(Awaited(rank, "node-0", 1) for rank in range(1000))
    assert "15] and 984 more (host node-0" in text


def test_no_rank_is_waited_for() -> None:
    message = waiting_on([], deadline_s=10)
    assert (message.text, list(message.ranks), message.deadline_s) == ("", [], 0)


def test_ranks_that_wait_in_the_same_call_for_the_same_reason_are_one_line() -> None:
    room, plan = save_pb2.WAIT_REASON_ROOM, save_pb2.WAIT_REASON_PLAN
    waits = [
        save_pb2.TrainingWait(
            call="async_save",
            checkpoint_id="gs://b/run/step-10",
            reason=reason,
            duration=duration(seconds),
            ranks=1,
        )
        for reason, seconds in ((room, 30.2), (plan, 3.5), (room, 32.0), (room, 8.0))
    ]
    shown = training_waits(waits)
    assert [each.summary for each in shown] == [
        "3 ranks in async_save of step-10 for 32 s (room)",
        "1 rank in async_save of step-10 for 4 s (plan)",
    ]
    samples = {each.labels["reason"]: each.value for each in ranks_waiting(shown).samples}
    assert samples == {"room": 3, "plan": 1, "sidecar": 0, "commit": 0}
