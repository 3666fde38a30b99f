"""The README's five minutes, as a reader would type them."""

import os
import re
import shlex
import sys
from pathlib import Path

from support.processes.daemons import clean_environment
from support.processes.processes import Process
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_checkpoint_of_the_readme(tmp_path: Path, embedded: Path) -> None:
    environment = {name: os.environ[name] for name in ("PANNIER_RUNTIME_DIR", "PANNIER_SPOOL")}
    script = next(block for block in blocks("python") if block.startswith("# train.py"))
    assert "/tmp/checkpoints" in script
    with start_ranks(script.replace("/tmp/checkpoints", str(tmp_path)), 2, environment) as ranks:
        ranks.wait(90).check()
    console = next(block for block in blocks("console") if "train.py" in block)
    commands = [line[2:] for line in console.splitlines() if line.startswith("$ pannier")]
    assert len(commands) == 2
    for number, line in enumerate(commands):
        words = shlex.split(line.replace("/tmp/checkpoints", str(tmp_path)))[1:]
        process = Process(
            f"command {number}",
            [sys.executable, "-m", "pannier.cli", *words],
            environment=clean_environment(environment),
            log=tmp_path / f"command-{number}.log",
        )
        assert process.wait(BOUND_S) == 0, process.log()
        assert "step-30" in process.log()
