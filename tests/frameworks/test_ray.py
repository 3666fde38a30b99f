"""Ray Train with the lines of docs/frameworks.md."""

import re
from pathlib import Path

from frameworks.killed_runs import PROGRAMS, listed
from support.actors.scripted_sidecar import wait_until
from support.processes.daemons import Daemons
from support.processes.processes import Process, python
from support.processes.ranks import rank_environment
from support.processes.stretch import BOUND_S


def test_a_worker_that_was_killed_resumes_bit_for_bit_and_ray_learns_of_committed_checkpoints(
    daemons: Daemons, sockets: Path, tmp_path: Path
) -> None:
    env = daemons.env(
        **daemons.environment,
        STORE=str(tmp_path),
        NAME="run",
        RAY_TMPDIR=str(sockets),
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
    )
    process = Process(
        "ray",
        python(str(PROGRAMS / "ray_job.py")),
        environment=rank_environment(env),
        log=tmp_path / "ray.log",
    )
    try:
        assert process.wait(5 * BOUND_S) == 0, process.log()
    finally:
        process.close()
    root = str(tmp_path / "run")
    for rank in range(2):
        made = re.findall(r"^step (\d+) (\w+)$", (tmp_path / f"rank-{rank}").read_text(), re.M)
        first, again = made[:5], made[5:]
        assert [step for step, _ in first] == ["1", "2", "3", "4", "5"]
        assert again[0][0] in ("3", "5")
        assert again[-1][0] == "8"
        # Steps that were made twice came to the same bits.
        assert dict(first) | dict(again) == dict(again) | dict(first)
    assert f"newest {root}/checkpoint-8" in process.log()
    wait_until(lambda: listed(root, env) == ["checkpoint-6", "checkpoint-8"])
