"""The line that the first rank of a group logs for each of its saves.

In: a committed save. Out: ``saved gs://b/run/step-30, 2.0 GiB from 8 ranks, stalled 59 ms, durable
after 0.9 s``. Pure, but for the log; any thread.
"""

from pannier.client.messages import console
from pannier.common.units import duration_text, size_text
from pannier.v1 import sidecar_pb2


def log_committed(
    context: sidecar_pb2.SaveContext,
    size: int,
    durable_s: float,
    stalled_s: float | None = None,
) -> None:
    """Logs the line on the first rank; nothing on the others.

    Args:
        size: bytes of all ranks.
        durable_s: from the call to the commit.
        stalled_s: for how long the call kept the training loop, on the slowest rank; None: until the commit.
    """
    if context.rank != context.ranks[0]:
        return
    ranks = f"{len(context.ranks)} rank{'s' if len(context.ranks) > 1 else ''}"
    stall = "" if stalled_s is None else f"stalled {duration_text(stalled_s)}, "
    console.info(
        "saved %s, %s from %s, %sdurable after %s",
        *(context.checkpoint_id, size_text(size), ranks, stall, duration_text(durable_s)),
    )
