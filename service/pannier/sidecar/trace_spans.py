"""What a sidecar has done for a save, as parts of its ranks' spans (:mod:`pannier.common.tracing`).

In: saves that have ended. Out: spans, where somebody wants them.
"""

from pannier.common import tracing
from pannier.sidecar.save_state import Phase, RankSave, Save


def trace(save: Save, rank: RankSave | None, urgent: bool) -> None:
    """A listener of :class:`pannier.sidecar.save_state.Saves`."""
    if save.verdict is None or rank is not None or not urgent:
        return
    for each in list(save.ranks.values()):
        tracing.export_parts(save.id, each.rank, _parts(each))


def _parts(rank: RankSave) -> list[tracing.Interval]:
    """Those whose begin and end were in this life of the sidecar."""
    about: dict[str, str | int | float] = {
        "pannier.checkpoint": rank.save.checkpoint_id,
        "pannier.attempt": rank.attempt,
        "pannier.rank": rank.rank,
        "pannier.host": rank.host,
        "pannier.retries": rank.retries,
        "pannier.transport": rank.transport,
    }
    parts = [
        tracing.Interval(
            f"upload {file.name}", file.since, file.stored, {**about, "pannier.bytes": file.size}
        )
        for file in list(rank.files.values())
        if file.stored is not None
    ]
    begin, held = (rank.reached.get(each.value) for each in (Phase.STREAMING, Phase.INGESTED))
    stored = rank.reached.get(Phase.DURABLE.value)
    error = rank.failure.message if rank.failure is not None else ""
    if begin is not None and held is not None:
        parts.append(tracing.Interval("take in", begin, held, about, "" if stored else error))
    if held is not None and stored is not None:
        last = max((part.end for part in parts), default=held)
        parts.append(tracing.Interval("write receipt", min(last, stored), stored, about))
    return parts
