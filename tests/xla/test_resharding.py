"""Every kind of state of SPMD programs comes back bit for bit, on other numbers of devices and meshes."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.states.xla import DEVICES, start_program
from support.states.xla_states import KINDS

PROGRAMS = Path(__file__).parent / "programs"
Report = dict[str, list[str]]


@dataclass(frozen=True)
class Runs:
    """What all programs found wrong."""

    saved: dict[int, Report]
    """By number of devices."""
    restored: dict[int, Report]
    """The same; reports by ``<kind>|<number of devices of the saver>``."""
    plain: list[Report]
    """By rank; reports by ``<kind>|<devices>|<kind of tensors>``."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    base = tmp_path_factory.mktemp("kinds")
    root, report = base / "checkpoints", base / "reports"
    report.mkdir()
    names = json.dumps([*KINDS])
    with Daemons(base) as daemons, ExitStack() as stack:
        env = daemons.env(
            ROOT=str(root), REPORT=str(report), KINDS=names, WORLDS=json.dumps(DEVICES)
        )
        programs = [
            stack.enter_context(start_program(PROGRAMS / "all_kinds.py", devices, env))
            for devices in DEVICES
        ]
        for program in programs:
            program.wait(200).check()
    # Nothing of Pannier runs while torch alone reads.
    roots = {str(devices): str(root / str(devices)) for devices in DEVICES}
    env = {"ROOTS": json.dumps(roots), "KINDS": names, "REPORT": str(report)}
    run_ranks(PROGRAMS / "plain_torch.py", 2, env, timeout=100, torchrun=False)

    def read(name: str) -> Report:
        found: Report = json.loads((report / f"{name}.json").read_text())
        return found

    return Runs(
        {devices: read(f"{devices}-saved") for devices in DEVICES},
        {devices: read(f"{devices}-restored") for devices in DEVICES},
        [read(f"plain-{rank}") for rank in range(2)],
    )


@pytest.mark.slow
@pytest.mark.timeout(400)  # The first one waits for all programs.
@pytest.mark.parametrize("name", KINDS)
def test_is_restored_bit_for_bit_from_any_number_of_devices(
    runs: Runs, name: str, devices: int
) -> None:
    problems = [f"saving: {text}" for text in runs.saved[devices][name]]
    for writers in DEVICES:
        found = runs.restored[devices][f"{name}|{writers}"]
        problems += [f"saved by {writers}: {text}" for text in found]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", KINDS)
def test_is_read_by_torch_alone(runs: Runs, name: str, devices: int) -> None:
    problems = [
        f"rank {rank}, {how}: {text}"
        for rank, report in enumerate(runs.plain)
        for how in ("plain", "DTensor")
        for text in report[f"{name}|{devices}|{how}"]
    ]
    assert not problems, "\n".join(problems)
