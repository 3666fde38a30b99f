"""Several hosts: each plans, saves and restores what its own devices hold, and together it is whole.

torch_xla's CPU backend makes no world of several processes, so these "hosts" are two processes that
each run the whole program on 8 virtual devices and are shown 4 of them (``programs/hosts.py``). With
real tensors, sidecars and a coordinator that shows plans of several ranks, dedup between them, the
files and the way back. It doesn't show torch_xla's runtime on several hosts: whether a device's work
is awaited there, and what of a tensor a process of a real TPU slice can address.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from support.processes.daemons import Daemons
from support.states.xla import run_program
from support.states.xla_states import KINDS

PROGRAMS = Path(__file__).parent / "programs"
HOSTS, DEVICES = 2, 8
NAMES = [
    "tiled",
    "two dimensions",
    "uneven",
    "uneven in two dimensions",
    "tiny",
    "partially replicated",
    "from partially replicated",
    "replicated",
    "unsharded",
    "nested, objects and tensors of the host",
]


@dataclass(frozen=True)
class Run:
    """What the hosts found."""

    wrong: list[dict[str, list[str]]]
    """By host; problems by kind."""
    transferred: list[dict[str, float]]
    """By host; bytes that it fetched for one save, by kind."""
    incomplete: list[str]
    """By host; what was said of a save that lacks the second host's part of a tensor."""
    root: Path
    """Of the checkpoints."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    base = tmp_path_factory.mktemp("hosts")
    with Daemons(base, sidecars=HOSTS) as daemons:
        run_program(
            PROGRAMS / "hosts.py",
            DEVICES,
            {"ROOT": str(base / "root"), "REPORT": str(base), "KINDS": json.dumps(NAMES)},
            timeout=200,
            processes=HOSTS,
            rank_env=lambda rank: daemons.env(rank),
        )
    reports = [json.loads((base / f"host-{host}.json").read_text()) for host in range(HOSTS)]
    transferred = [report.pop("transferred") for report in reports]
    incomplete = [report.pop("incomplete") for report in reports]
    return Run(reports, transferred, incomplete, base / "root")


@pytest.mark.slow
@pytest.mark.timeout(300)  # The first one waits for the program.
@pytest.mark.parametrize("name", NAMES)
def test_hosts_save_their_own_parts_and_get_their_own_back(run: Run, name: str) -> None:
    problems = [f"host {h}: {text}" for h, report in enumerate(run.wrong) for text in report[name]]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planner", ["ours", "torch_xla's"])
def test_what_several_devices_hold_is_stored_once(run: Run, name: str, planner: str) -> None:
    directory = run.root / name / str(["ours", "torch_xla's"].index(planner))
    metadata = FileSystemReader(directory).read_metadata()
    values = KINDS[name].values(3)
    for fqn, entry in metadata.state_dict_metadata.items():
        chunks = getattr(entry, "chunks", None)
        if chunks is None or "." in fqn or fqn not in values:
            continue
        places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        assert len(set(places)) == len(places), fqn
        assert sum(chunk.sizes.numel() for chunk in chunks) == values[fqn].numel(), fqn


def test_both_hosts_have_written(run: Run) -> None:
    metadata = FileSystemReader(run.root / "tiled" / "0").read_metadata()
    writers = {place.relative_path.rpartition("__")[2] for place in metadata.storage_data.values()}
    assert len(writers) == HOSTS


def test_a_host_fetches_only_what_it_writes(run: Run) -> None:
    def whole(name: str) -> int:
        return sum(tensor.nbytes for tensor in KINDS[name].values(3).values())

    tiled = [each["tiled"] for each in run.transferred]
    assert tiled == [whole("tiled") / HOSTS] * HOSTS
    # Each host has all of it; the plan has one of them write it.
    assert sum(each["replicated"] for each in run.transferred) == whole("replicated")
    assert all(each["replicated"] for each in run.transferred)


def test_a_tensor_that_lacks_a_hosts_part_is_not_saved(run: Run) -> None:
    for said in run.incomplete:
        assert "'16x8'" in said
        assert "not whole" in said
    assert not (run.root / "incomplete" / ".metadata").exists()
