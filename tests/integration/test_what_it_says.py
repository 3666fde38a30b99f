"""What a user's program, run as users run theirs, shows on stderr: what it saved, and short tracebacks."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.daemons import Daemons, clean_environment
from support.processes.stretch import BOUND_S

_PROGRAM = """
import sys, traceback
import torch
from pannier import client
from torch.distributed.checkpoint import DefaultSavePlanner

class Planner(DefaultSavePlanner):
    def create_local_plan(self):
        raise ZeroDivisionError("theirs")

def shown(call):
    try:
        call()
    except Exception:
        print(traceback.format_exc(), "=" * 70, sep="")

root = sys.argv[1]
state = {"w": torch.zeros(500, 500), "step": 1}
client.async_save(state, checkpoint_id=f"{root}/step-1").result()
client.async_save(state, checkpoint_id=f"{root}/step-2").result()
client.save(state, checkpoint_id=f"{root}/step-2")  # the same job's
client.load(state, checkpoint_id=client.latest(root))
shown(lambda: client.save(state, checkpoint_id=f"{root}/step-3", planner=Planner()))
shown(lambda: client.save(state, checkpoint_id=sys.argv[2]))  # another job's
client.save(state, checkpoint_id=sys.argv[2], overwrite=True)
shown(lambda: client.save(state, checkpoint_id="gs:/bucket/step-1"))
client.close()
client.configure(sidecar="unix:///tmp/pannier-no-such.sock")
shown(lambda: client.save(state, checkpoint_id=f"{root}/step-3"))
client.load(state, checkpoint_id=f"{root}/step-4")
"""
_TIME = r"\d[\d.]* (?:m?s|min(?: \d+ s)?)"
_SAVED = rf"pannier: saved {{}}, 97\d\.\d KiB from 1 rank, stalled {_TIME}, durable after {_TIME}"
_LOADED = rf"pannier: loaded {{}}, 97\d\.\d KiB in {_TIME}, 2 files: 2 own spool"


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with Daemons(tmp_path_factory.mktemp("says")) as running:
        yield running


def start(
    script: Path, code: str, *arguments: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    script.write_text(code)
    # Warnings are errors: the client gives no cause for any.
    command = [sys.executable, "-W", "error", str(script), *arguments]
    return subprocess.run(
        command,
        env=clean_environment(environment),
        capture_output=True,
        text=True,
        timeout=4 * BOUND_S,
        check=False,
    )


def frames(trace: str) -> list[str]:
    return re.findall(r'  File "(.*)", line', trace)


@pytest.mark.slow
def test_a_program_shows_its_saves_and_its_errors_where_it_made_the_call(
    daemons: Daemons, tmp_path: Path
) -> None:
    root, other = tmp_path / "run", tmp_path / "other" / "step-1"
    environment = {"PANNIER_SIDECAR": daemons.sidecar_address}
    first = start(
        tmp_path / "first.py",
        "import sys, torch\n"
        "from pannier import client\n"
        "client.save({'w': torch.ones(3)}, checkpoint_id=sys.argv[1])\n",
        str(other),
        environment={**environment, "PANNIER_LOG": "off"},
    )
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    done = start(tmp_path / "train.py", _PROGRAM, str(root), str(other), environment=environment)
    assert done.returncode == 1, done.stderr
    says, trace = done.stderr.split("Traceback", 1)
    saved = [root / "step-1", root / "step-2", root / "step-2", other]
    lines = [line for line in says.splitlines() if " has waited " not in line]
    expected = [_SAVED.format(place) for place in saved]
    expected.insert(3, _LOADED.format(root / "step-2"))
    assert len(lines) == len(expected), done.stderr
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)

    planner, exists, typo, unreachable = done.stdout.split("=" * 70)[:4]
    assert "in create_local_plan" in planner
    assert "raise ZeroDivisionError" in planner
    job = r"job-[0-9a-f]{8}"
    assert re.search(
        rf"other/step-1 holds a checkpoint of job {job}, and this is job {job}", exists
    )
    assert "overwrite=True" in exists
    assert "use gs://bucket/step-1" in typo
    assert not Path("gs:").exists()
    assert "pannier-no-such.sock can't be reached: its socket doesn't exist" in unreachable
    assert "check that `pannier sidecar` runs on this host" in unreachable
    for short in (exists, typo, unreachable, "Traceback" + trace):
        # The program's own, and two of Pannier.
        assert "train.py" in frames(short)[0]
        assert len([each for each in frames(short) if "train.py" not in each]) <= 2, short
        assert "direct cause" not in short
        assert "During handling" not in short
        for word in ("grpc", "tenacity", "StatusCode", "last error"):
            assert word not in short
    assert trace.splitlines()[-1].endswith("step-4 is no checkpoint: it doesn't exist")
