"""Reports of loads, as ranks make them."""

from typing import Any

from pannier.v1 import load_status_pb2

READING = load_status_pb2.LOAD_PHASE_READING
LOADED = load_status_pb2.LOAD_PHASE_LOADED
ENTERING = load_status_pb2.LOAD_PHASE_ENTERING


class ReportingRank:
    """One rank's call of load; reports with what has changed."""

    def __init__(
        self, rank: int, call: str, *, of: int = 2, group: str = "g", place: str = "/c/step-1"
    ) -> None:
        self.report = load_status_pb2.LoadReport(
            call=call, group=group, checkpoint_id=place, ranks=range(of), pid=100 + rank
        )
        self.report.status.rank, self.report.status.host = rank, f"node-{rank}"
        self.report.status.phase = ENTERING

    def __call__(self, *, load: str = "", **fields: Any) -> load_status_pb2.LoadReport:
        """The next report; ``bytes`` is by source."""
        self.report.load = load or self.report.load
        for source, size in fields.pop("bytes", {}).items():
            known = [each for each in self.report.status.sources if each.source == source]
            found = known[0] if known else self.report.status.sources.add(source=source, files=1)
            found.bytes = size
        for name, value in fields.items():
            setattr(self.report.status, name, value)
        made = load_status_pb2.LoadReport()
        made.CopyFrom(self.report)
        return made
