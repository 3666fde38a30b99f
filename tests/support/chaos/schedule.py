"""What goes wrong in a run of the chaos test, and when: a function of the seed alone."""

import random
from dataclasses import dataclass, field
from typing import Any

HOSTS = 2
LINKS = (
    *(f"sidecar {host} to coordinator" for host in range(HOSTS)),
    *(f"sidecar {host} to storage" for host in range(HOSTS)),
    "coordinator to storage",
)


@dataclass(frozen=True)
class Event:
    """One thing that goes wrong."""

    at_s: float
    """Seconds after the first save was committed."""
    kind: str
    """A method of :class:`support.chaos.events.Events`."""
    lasts_s: float = 0.0
    """Until it is put right again."""
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.kind.replace("_", " "), *(f"{k}={v}" for k, v in self.details.items())]
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:5.1f} s  {' '.join(words)}{lasts}"


def _kill_trainer(chance: random.Random) -> tuple[float, dict[str, Any]]:
    # Elastic: the next incarnation may be of another size.
    world = chance.choice([4, 4, 4, 2])
    return chance.uniform(0.05, 1.2), {"rank": chance.randrange(4), "world": world}


def _kill_all_trainers(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.uniform(0.05, 0.5), {"world": chance.choice([4, 4, 2])}


def _stop_trainer(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.3, 2.0, 7.0]), {"rank": chance.randrange(4)}


def _kill_sidecar(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.05, 0.5, 2.5]), {"host": chance.randrange(HOSTS)}


def _stop_sidecar(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.3, 2.0, 6.5]), {"host": chance.randrange(HOSTS)}


def _kill_host(chance: random.Random) -> tuple[float, dict[str, Any]]:
    details = {"host": chance.randrange(HOSTS), "spool": chance.choice(["kept", "lost"])}
    return chance.uniform(0.2, 1.5), details


def _kill_coordinator(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.05, 0.5, 2.5]), {}


def _stop_coordinator(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.3, 2.0, 6.5]), {}


def _cut(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.2, 1.5, 5.0]), {"link": chance.choice(LINKS)}


def _stall(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.choice([0.5, 2.5, 6.0]), {"link": chance.choice(LINKS)}


def _slow(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.uniform(1, 4), {"link": chance.choice(LINKS), "delay_s": 0.05}


def _storage_errors(chance: random.Random) -> tuple[float, dict[str, Any]]:
    fault: dict[str, Any] = {"kind": chance.choice(["status", "reset", "lost", "partial"])}
    fault["times"] = chance.randint(1, 6)
    fault["skip"] = chance.randint(0, 4)
    fault["method"] = chance.choice(["", "POST", "PUT"])
    if fault["kind"] == "status":
        fault["status"] = chance.choice([429, 500, 503])
    if fault["kind"] == "partial":
        fault["bytes"] = chance.choice([0, 1000, 300_000])
    return 0.0, fault


def _corruption(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return 0.0, {"kind": "corrupt", "method": "PUT", "times": 1, "skip": chance.randint(0, 3)}


def _storage_outage(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.uniform(0.5, 4), {"status": chance.choice([429, 503])}


def _slow_storage(chance: random.Random) -> tuple[float, dict[str, Any]]:
    return chance.uniform(1, 5), {"seconds": chance.choice([0.1, 0.5])}


_KINDS = {
    "kill_trainer": (_kill_trainer, 3),
    "kill_all_trainers": (_kill_all_trainers, 1),
    "stop_trainer": (_stop_trainer, 2),
    "kill_sidecar": (_kill_sidecar, 4),
    "stop_sidecar": (_stop_sidecar, 2),
    "kill_host": (_kill_host, 1),
    "kill_coordinator": (_kill_coordinator, 4),
    "stop_coordinator": (_stop_coordinator, 2),
    "cut": (_cut, 4),
    "stall": (_stall, 3),
    "slow": (_slow, 2),
    "storage_errors": (_storage_errors, 5),
    "corruption": (_corruption, 1),
    "storage_outage": (_storage_outage, 1),
    "slow_storage": (_slow_storage, 2),
}
"""How to draw one of each kind, and how often it comes."""
KINDS = tuple(_KINDS)


ACTS = (
    "restart_after_long_uploads",
    "lost_records",
    "expired_saves",
    "reverse_commits",
    "hung_mount",
    "unreachable_storage",
)
"""Each is a function of :mod:`support.chaos.acts`."""
HOUR_S = 3600.0


def act(seed: int) -> str:
    """What comes at the end, alone, and with an outcome that is certain."""
    return ACTS[seed % len(ACTS)]


def clocks(seed: int) -> tuple[float, float, float]:
    """How wrong the wall clocks are, in seconds: of each host, and of the coordinator's."""
    if seed % 5 not in (1, 4):
        return 0.0, 0.0, 0.0
    chance = random.Random(f"clocks {seed}")
    first, second, coordinator = chance.sample([-HOUR_S, 0.0, HOUR_S], 3)
    return first, second, coordinator


def schedule(seed: int, seconds: float, *, gap_s: float = 1.0) -> list[Event]:
    """The events of a seed, in order of time.

    Args:
        seconds: how long things go wrong.
        gap_s: mean time between two events.
    """
    chance = random.Random(seed)
    weights = [weight for _, weight in _KINDS.values()]
    events = []
    at = chance.expovariate(1 / gap_s)
    while at < seconds:
        kind = chance.choices(KINDS, weights)[0]
        lasts, details = _KINDS[kind][0](chance)
        events.append(Event(at, kind, lasts, details))
        at += chance.expovariate(1 / gap_s)
    return events
