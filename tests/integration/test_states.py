"""Every kind of state comes back bit for bit, whatever the layouts, though it was changed at once."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks
from support.states.bits import bits, differences
from support.states.sharded_states import KINDS
from support.states.states import quantized

SCRIPTS = Path(__file__).parent / "ranks"
SEED = 3
WRITERS = (4, pytest.param(2, marks=pytest.mark.extended))
AGAIN = 4
"""As many ranks save by the plan of an earlier save."""
READERS = {3: "client", 2: "dcp client", 1: "client"}
"""What loads, by number of ranks that do."""


@dataclass(frozen=True)
class Runs:
    """What the ranks found wrong that saved, and those that read it."""

    writers: int
    written: list[dict[str, list[str]]]
    """By rank; reports by kind."""
    read: dict[int, list[dict[str, list[str]]]]
    """By number of ranks, and rank; reports by ``<kind>|<target>|<reader>|<root>``."""
    root: Path
    """Where the checkpoints are."""


def _run(script: str, ranks: int, directory: Path, env: dict[str, str]) -> None:
    directory.mkdir()
    environment = {**env, "REPORT": str(directory), "SEED": str(SEED)}
    run_ranks(SCRIPTS / script, ranks, environment, timeout=200, torchrun=False)


def _reports(directory: Path, ranks: int, prefix: str = "") -> list[dict[str, list[str]]]:
    return [json.loads((directory / f"{prefix}{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda ranks: f"by {ranks}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    writers = request.param
    base = tmp_path_factory.mktemp("states")
    root = base / "root"
    with Daemons(base) as daemons:
        again = {"AGAIN": "1"} if writers == AGAIN else {}
        _run("write_states.py", writers, base / "written", daemons.env(ROOT=str(root), **again))
    # Nothing of Pannier runs while the checkpoints are read.
    env = {
        "ROOTS": json.dumps({str(root): [writers, [*KINDS]]}),
        "READERS": json.dumps(READERS),
    }
    _run("read_states.py", max(READERS), base / "read", env)
    read = {ranks: _reports(base / "read", ranks, f"{ranks}-") for ranks in READERS}
    return Runs(writers, _reports(base / "written", writers), read, root)


@pytest.mark.slow
@pytest.mark.timeout(400)  # The first one waits for all runs.
@pytest.mark.parametrize("name", KINDS)
def test_comes_back_bit_for_bit_in_any_layout(runs: Runs, name: str) -> None:
    problems = []
    for rank, report in enumerate(runs.written):
        problems += [f"saving, rank {rank} of {runs.writers}: {t}" for t in report[name]]
    loads = 0
    for ranks, reports in runs.read.items():
        for rank, report in enumerate(reports):
            for key, found in report.items():
                saved, target, how, root = key.split("|")
                if saved == name:
                    loads += 1
                    where = f"{how}, rank {rank} of {ranks}, {target} from {root}"
                    problems += [f"{where}: {text}" for text in found]
    assert not problems, "\n".join(problems)
    ways = {ranks: len(how.split()) for ranks, how in READERS.items() if ranks in KINDS[name].ranks}
    assert loads >= sum(ranks * count for ranks, count in ways.items())


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.most_bytes])
def test_stores_no_more_bytes_than_it_must(runs: Runs, name: str) -> None:
    files = list((runs.root / name).glob("*.distcp"))
    assert files
    assert sum(path.stat().st_size for path in files) <= (KINDS[name].most_bytes or 0)


def test_quantized_tensors_and_subclasses_are_stored_as_they_are(runs: Runs) -> None:
    stored = _stored(runs.root / "quantized")
    wanted = quantized(SEED)
    assert stored["tensor"].is_quantized
    assert not differences(stored, wanted)
    pair = _stored(runs.root / "wrapper subclass")["pair"]
    assert type(pair).__name__ == "TwoTensor"


def test_a_transformed_tensor_is_stored_in_its_new_dtype(runs: Runs) -> None:
    stored = _stored(runs.root / "transform_object")
    assert stored["wide"].dtype is torch.bfloat16
    assert stored["exact"].dtype is torch.float64


def test_tied_weights_are_stored_by_every_name_as_torch_does(runs: Runs) -> None:
    stored = _stored(runs.root / "tied")
    assert bits(stored["embedding"]) == bits(stored["head"])
    assert bits(stored["embedding"][2:5]) == bits(stored["rows"])


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as torch unpickles them from the data files."""
    storage = FileSystemReader(directory).read_metadata().storage_data
    found = {}
    for index, place in storage.items():
        data = (directory / place.relative_path).read_bytes()
        path = directory / "entry"
        path.write_bytes(data[place.offset : place.offset + place.length])
        value = torch.load(path, weights_only=False)
        path.unlink()
        if isinstance(value, torch.Tensor):
            found[index.fqn] = value
    return found
