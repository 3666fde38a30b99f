"""What must hold after a run of the chaos test, whatever went wrong in it.

In: what the ranks wrote down, and the bucket. Out: problems, in words; none if all is well.
Runs in a process of its own, over a link that nothing disturbs.
"""

import asyncio
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SaveKey = tuple[int, int]
"""Incarnation and number: a greater one is newer."""


@dataclass
class RecordedSave:
    """One save, as its ranks recorded it."""

    id: str = ""
    world: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)
    """By rank: ``committed``, ``aborted``, ``skipped``, ``raised`` or ``doubt``."""
    reasons: dict[int, str] = field(default_factory=dict)
    crcs: dict[int, dict[str, int]] = field(default_factory=dict)
    attempts: set[str] = field(default_factory=set)

    @property
    def committed(self) -> bool:
        return "committed" in self.outcomes.values()

    @property
    def failed(self) -> bool:
        return bool({"aborted", "skipped", "raised"} & set(self.outcomes.values()))


@dataclass
class Report:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    saves: int = 0
    committed: int = 0
    failed: int = 0
    unknown: int = 0
    """Saves of killed ranks, or whose outcome no rank recorded."""
    visible: int = 0


def read_events(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of all ranks, oldest first."""
    # What comes after the last end of a line is still being written.
    texts = [path.read_text().rpartition("\n")[0] for path in paths]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted(lines, key=lambda line: float(line["at"]))


def recorded_saves(
    events: Iterable[Mapping[str, Any]], problems: list[str]
) -> dict[SaveKey, RecordedSave]:
    """The saves by incarnation and number."""
    saves: dict[SaveKey, RecordedSave] = defaultdict(RecordedSave)
    for event in events:
        if "number" not in event:
            continue
        save = saves[event["incarnation"], event["number"]]
        rank = event["rank"]
        save.id, save.world = event["id"], event["world"]
        what = event["event"]
        if what == "begin":
            save.crcs[rank] = event["crc"]
        elif what == "staged":
            number = int(event["save"].rpartition("/")[2])
            if number != event["number"]:
                problems.append(
                    f"rank {rank} of incarnation {event['incarnation']} called save "
                    f"{event['number']}, which was counted as {number}"
                )
        elif what == "raised":
            save.outcomes[rank], save.reasons[rank] = "raised", event["error"]
        elif what == "ended":
            save.outcomes[rank], save.reasons[rank] = event["outcome"], event["error"]
            save.attempts.add(event["attempt"])
        elif what == "hangs":
            problems.append(f"rank {rank}, save {event['number']} hangs: {event['error']}")
    return dict(saves)


def check(arguments: Mapping[str, Any]) -> int:
    """Writes a :class:`Report` as JSON; the exit status is 0 all the same.

    Args:
        arguments: ``root``, ``endpoint`` of storage, ``events`` (paths) and ``report`` (a path).
    """
    os.environ["STORAGE_EMULATOR_HOST"] = arguments["endpoint"]
    report = Report()
    saves = recorded_saves(read_events(Path(path) for path in arguments["events"]), report.problems)
    report.saves = len(saves)
    report.committed = sum(save.committed for save in saves.values())
    report.failed = sum(save.failed for save in saves.values())
    report.unknown = report.saves - report.committed - report.failed
    for key, save in saves.items():
        if save.committed and save.failed:
            report.problems.append(
                f"{_name(key, save)}: ranks disagree how it ended: {save.reasons}"
            )
    root = arguments["root"]
    names = asyncio.run(_listed(root))
    visible = [
        f"{root}/{match[1]}"
        for name in names
        if (match := re.fullmatch(r"([^/.][^/]*)/\.metadata", name))
    ]
    report.visible = len(visible)
    standing: dict[str, SaveKey] = {}
    attempts: dict[str, str] = {}
    for id in visible:
        try:
            standing[id], attempts[id] = _check_visible(id, saves, report.problems)
        except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint is not whole
            report.problems.append(f"{id} can't be loaded: {type(error).__name__}: {error}")
    for key, save in saves.items():
        if save.committed and (save.id not in visible or standing.get(save.id, key) < key):
            report.problems.append(
                f"{_name(key, save)} was committed, but {standing.get(save.id, 'nothing')} is there"
            )
    if standing:
        newest = max(standing, key=lambda id: standing[id])
        report.problems += asyncio.run(_not_newest(root, newest))
    left = leftovers(names, root, attempts)
    if left:
        report.problems.append(f"left by gc: {left[:5]}")
    Path(arguments["report"]).write_text(json.dumps(vars(report)))
    return 0


def _name(key: SaveKey, save: RecordedSave) -> str:
    return f"save {key[1]} of incarnation {key[0]} to {save.id} ({', '.join(save.attempts)})"


async def _listed(root: str) -> list[str]:
    """Names of all objects below the root."""
    from pannier.storage import open_store

    store = open_store(root)
    try:
        return [each.key for each in await store.list("")]
    finally:
        await store.close()


async def _not_newest(root: str, newest: str) -> list[str]:
    """What takes another checkpoint than ``newest`` for the newest one of the root."""
    from pannier import client
    from pannier.attempts.listing import list_checkpoints
    from pannier.maintenance.retention_policy import Policy, apply_policy
    from pannier.storage import open_store

    store = open_store(root)
    try:
        verdicts = apply_policy(Policy(newest=1), await list_checkpoints(store), job="chaos")
    finally:
        await store.close()
    kept = [f"{root}/{each.checkpoint.name}" for each in verdicts if "newest" in each.reasons]
    problems = []
    if kept != [newest]:
        problems.append(f"retention takes {kept} for the newest checkpoint, which is {newest}")
    found = await asyncio.to_thread(client.latest, root, no_dist=True)
    if found != newest:
        problems.append(f"latest() is {found}, the newest save that was committed is in {newest}")
    return problems


_KEPT = re.compile(r"(?:(?P<id>[^/]+)/)?\.pannier/(?:(?P<attempt>i\d+-[^/]+)/(?P<what>.+)|.*)")
_DATA = re.compile(r"(?P<id>[^/]+)/__(?P<attempt>i[^_]+)_.*\.distcp")


def leftovers(names: Iterable[str], root: str, standing: Mapping[str, str]) -> list[str]:
    """What ``pannier gc`` had to remove and didn't; ``standing`` has the attempt by id."""
    left = []
    for name in names:
        match = _DATA.fullmatch(name) or _KEPT.fullmatch(name)
        if match is None or match["attempt"] is None:
            continue
        decision = "what" in match.groupdict() and match["what"] == "decision"
        if standing.get(f"{root}/{match['id']}") != match["attempt"] and not decision:
            left.append(name)
    return left


def _check_visible(
    id: str, saves: Mapping[SaveKey, RecordedSave], problems: list[str]
) -> tuple[SaveKey, str]:
    """Whose it is, and its attempt; adds what is wrong with it."""
    import torch

    from support.chaos import states as chaos_states
    from support.states import bits
    from support.states.dcp_readers import fsspec_reader, plain_load

    asyncio.run(_verify(id, problems))
    attempt = fsspec_reader(id).read_metadata().storage_meta.save_id
    stamp = {chaos_states.STAMP: torch.zeros(3, dtype=torch.int64)}
    plain_load(stamp, id, no_dist=True)
    incarnation, number, world = stamp[chaos_states.STAMP].tolist()
    key = (int(incarnation), int(number))
    save = saves.get(key)
    if save is None or save.id != id:
        problems.append(f"{id} is of {key}, which no rank has saved there")
        return key, attempt
    want = chaos_states.whole(*key, world)
    got = chaos_states.blank(want)
    plain_load(got, id, no_dist=True)
    different = bits.differences(got, want)
    if different:
        problems.append(f"{_name(key, save)} was not what was saved: {different[:5]}")
    for rank, crc in save.crcs.items():
        if chaos_states.checksums_of(got, world, rank) != crc:
            problems.append(f"{_name(key, save)}: not the bits that rank {rank} had")
    if save.failed:
        problems.append(f"{_name(key, save)} is visible, but it failed: {save.reasons}")
    return key, attempt


async def _verify(id: str, problems: list[str]) -> None:
    from pannier.maintenance.verify import verify
    from pannier.storage import open_store

    store = open_store(id)
    try:
        result = await verify(store, progress=lambda count, total: None)
    finally:
        await store.close()
    bad = [finding for finding in result.findings if finding.status != "ok"]
    if bad:
        problems.append(f"{id} is damaged: {bad[:3]}")


if __name__ == "__main__":
    sys.exit(check(json.loads(sys.argv[1])))
