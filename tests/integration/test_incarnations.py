"""Two lives of one job at the same time: only the newer one saves."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.client import Client, SaveAbortedError
from pannier.client.config import load_settings
from support.processes.daemons import Daemons, clean_environment
from support.processes.processes import MARKER, SESSION, python
from support.processes.stretch import BOUND_S

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LATE = """
import sys
import torch
from pannier import client

print(client.latest(sys.argv[1]), flush=True)
sys.stdin.readline()
try:
    client.save({"w": torch.ones(4)}, checkpoint_id=f"{sys.argv[1]}/late")
except client.SaveAbortedError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """A host each, with one coordinator."""
    with Daemons(tmp_path_factory.mktemp("incarnations"), sidecars=2) as running:
        yield running


def life(daemons: Daemons, sidecar: int, monkeypatch: pytest.MonkeyPatch) -> Client:
    for name, value in daemons.env(sidecar, PANNIER_JOB="job").items():
        monkeypatch.setenv(name, value)
    return Client(load_settings())


def save(client: Client, place: Path) -> None:
    client.save({"w": torch.ones(4)}, checkpoint_id=place)


def test_the_older_of_two_lives_saves_no_more(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life(daemons, 0, monkeypatch) as older, life(daemons, 1, monkeypatch) as newer:
        save(older, tmp_path / "step-1")
        save(older, tmp_path / "step-2")
        save(newer, tmp_path / "step-3")
        # By the plan that it has cached; and planned again after that.
        for number in (4, 5):
            with pytest.raises(SaveAbortedError, match=r"is not its newest.*PANNIER_JOB"):
                save(older, tmp_path / f"step-{number}")
            assert not (tmp_path / f"step-{number}" / ".metadata").exists()
        save(newer, tmp_path / "step-6")
        assert newer.latest(tmp_path) == str(tmp_path / "step-6")


def test_a_life_that_began_before_another_saved_does_not_follow_it(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = clean_environment(daemons.env(1, PANNIER_JOB="job"))
    with subprocess.Popen(
        python("-c", LATE, str(tmp_path)),
        env={**environment, MARKER: SESSION},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as late:
        assert late.stdout is not None
        assert late.stdout.readline() == "None\n"
        with life(daemons, 0, monkeypatch) as newer:
            save(newer, tmp_path / "step-1")
            out, _ = late.communicate("go on\n", timeout=2 * BOUND_S)
            assert "is not its newest" in out
            save(newer, tmp_path / "step-2")
    assert not (tmp_path / "late" / ".metadata").exists()
