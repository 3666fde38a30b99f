"""Settings of a coordinator, checked when they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pannier.daemon.settings import DaemonSettings
from pannier.maintenance.retention_policy import Policy
from pannier.maintenance.superseded import GRACE_S
from pannier.wire.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(DaemonSettings):
    """Settings of ``pannier coordinator``. Raises ConfigurationError naming the setting."""

    address: str = "unix:///run/pannier/coordinator.sock"
    """Where sidecars reach it: ``unix:///path`` or ``host:port``."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file systems."""
    planner: tuple[str, ...] = ()
    """``module:Class`` of planners that override global planning and may run here; an embedded one needs no names."""
    embedded: bool = False
    """Started by a client (``pannier up``)."""
    idle_exit_s: float | None = None
    """Exit after so many seconds without a trainer or an undecided save on any host; None: never."""
    suspect_after_s: float = 5
    """Seconds without a heartbeat until a trainer counts as unresponsive, even if its sidecar responds."""
    retention: Policy = field(default_factory=Policy)
    """Which checkpoints of a job stay after each commit; by default all."""
    grace_superseded_s: float = GRACE_S
    """Seconds that the files of an overwritten checkpoint stay, for readers without a lease."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.planner:
            module, colon, cls = name.partition(":")
            if not (module and colon and cls):
                raise ConfigurationError(f"--planner {name!r} is not module:Class")
        if not 0 <= self.grace_superseded_s < float("inf"):
            raise ConfigurationError(
                f"--grace-superseded {self.grace_superseded_s} is not a number of seconds from 0"
            )
        for setting, value in (
            ("--suspect-after", self.suspect_after_s),
            ("--idle-exit", self.idle_exit_s),
        ):
            if value is not None and not value > 0:
                raise ConfigurationError(f"{setting} {value} is not a positive number of seconds")
