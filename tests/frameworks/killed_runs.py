"""Trains with a framework on two ranks, kills them in the middle of a save, and starts them again.

A program reports its steps as :mod:`frameworks.progress` does, and saves every second one below ``ROOT``. Its
ranks have files of over 8 MiB, which :func:`support.storage.bucket.hold_up` can delay.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pannier.v1 import save_pb2
from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import Ranks, run_ranks, start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import COMMITTED, all_in, await_save
from support.storage.bucket import check_whole, hold_up
from support.storage.gcs_server import GcsServer

PROGRAMS: Final = Path(__file__).parent / "programs"
STEPS: Final = 8
INGESTED: Final = all_in(save_pb2.RANK_PHASE_INGESTED)


def steps(output: str) -> dict[int, str]:
    """Digest of each step that a rank has made."""
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) (\w+)$", output, re.M)}


def listed(root: str, env: Mapping[str, str]) -> list[str]:
    """Names of the committed checkpoints below a root, as ``pannier ls`` has them, oldest first."""
    done = pannier("ls", "--json", root, env=env)
    assert done.code == 0, done
    found = [each for each in done.json_lines() if each["state"] == "committed"]
    return [each["checkpoint"].removeprefix(f"{root}/") for each in found]


def check_resumes(
    program: Path,
    name: str,
    daemons: Daemons,
    server: GcsServer,
    directory: Path,
    checkpoint: Callable[[int], str],
    **environment: str,
) -> None:
    """An uninterrupted job and one that was killed and started again come to the same bits.

    Of both, the two newest checkpoints are left, for the coordinator's ``--keep-newest 2``.

    Args:
        name: of the directories below the bucket.
        directory: for the files of the test.
        checkpoint: name of a step's checkpoint.
        environment: added to that of all ranks.
    """
    env = {**daemons.env(**daemons.environment), "STEPS": str(STEPS), **environment}

    def env_of(job: str) -> dict[str, str]:
        scratch = directory / job
        scratch.mkdir(exist_ok=True)
        return {**env, "ROOT": f"gs://bucket/{name}-{job}", "SCRATCH": str(scratch)}

    whole, killed = env_of("whole"), env_of("killed")
    wanted = [steps(output) for output in train(program, whole)]
    assert [*wanted[0]] == [*range(1, STEPS + 1)]
    before = _kill_in_a_save(program, killed, daemons, server, checkpoint)
    # On another host, as far as local files go.
    again = {**killed, "SCRATCH": env_of("again")["SCRATCH"]}
    for rank, output in enumerate(train(program, again)):
        assert "resumes after 4\n" in output
        after = steps(output)
        assert [*after] == [5, 6, 7, 8]
        assert {**before[rank], **after} == wanted[rank]
    kept = [checkpoint(6), checkpoint(8)]
    for each in (whole, killed):
        # Retention runs after the commit.
        wait_until(lambda root=each["ROOT"]: listed(root, env) == kept)
        check_whole(server, f"{each['ROOT']}/{kept[-1]}")


def train(program: Path, env: Mapping[str, str]) -> list[str]:
    """Trains to the end; the ranks' outputs."""
    return run_ranks(program, 2, env, 3 * BOUND_S, torchrun=False).outputs


def _kill_in_a_save(
    program: Path,
    env: Mapping[str, str],
    daemons: Daemons,
    server: GcsServer,
    checkpoint: Callable[[int], str],
) -> list[dict[int, str]]:
    """Kills all ranks after step 5: step 2 is committed, step 4 ingested and not uploaded.

    Returns the steps of each rank. The bucket takes uploads again when this returns.
    """
    root, go = env["ROOT"], Path(env["SCRATCH"]) / "go"
    go.mkdir()
    paused = {**env, "PAUSE_AFTER": "3,5", "GO": str(go)}
    with start_ranks(program, 2, paused, torchrun=False) as ranks:
        _await_step(ranks, 3)
        first, second = (f"{root}/{checkpoint(step)}" for step in (2, 4))
        address = daemons.coordinator_address
        await_save(address, first, lambda status: status.state == COMMITTED)
        hold_up(server)
        (go / "3").touch()
        _await_step(ranks, 5)
        await_save(address, second, INGESTED)
        ranks.kill()
        outputs = [ranks.output(rank) for rank in range(2)]
    assert listed(root, env) == [checkpoint(2)]
    server.clear()
    return [steps(output) for output in outputs]


def _await_step(ranks: Ranks, step: int) -> None:
    for rank in range(2):
        ranks.wait_for(f"\nstep {step} ", rank=rank, timeout=3 * BOUND_S)
