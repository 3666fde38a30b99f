"""Restores from the spool: whatever dies, changes or is in the way, the bytes are those of the checkpoint."""

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.actors.scripted_sidecar import wait_until
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import run_ranks, start_ranks
from support.processes.stretch import BOUND_S
from support.processes.watching import listed
from support.storage.bucket import data_reads, remove
from support.storage.bucket import listed as listed_objects
from support.storage.gcs_server import GcsServer

ROOT = "gs://bucket/local"

STATE = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros
from pannier import client

WORLD, RANK, MIB = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), int(os.environ["MIB"])
if WORLD > 1:
    dist.init_process_group("gloo")

def whole(step):
    # Bytes that are not the same in any two blocks.
    return (torch.arange(MIB << 18, dtype=torch.int32) * 31 + step).view(-1, 256)

def state(step=None):
    value = torch.zeros_like(whole(0)) if step is None else whole(step)
    if WORLD > 1:
        value = distribute_tensor(value, init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    return {"w": value, "step": torch.tensor([step or 0])}

def path(step):
    return f"{os.environ['ROOT']}/step-{step}"
"""
SAVING = (
    STATE
    + """
for step in map(int, os.environ["STEPS"].split()):
    client.save(state(step), checkpoint_id=path(step))
print("DONE", flush=True)
signal.pause()
"""
)
LOADING = (
    STATE
    + """
step = int(os.environ["STEP"])
found = state()
result = client.load(found, checkpoint_id=path(step))
value = found["w"].full_tensor() if WORLD > 1 else found["w"]
assert torch.equal(value, whole(step)), (value, whole(step))
assert found["step"].tolist() == [step]
print("RESULT", __import__("json").dumps([dict(result.files), dict(result.bytes), str(result)]))
"""
)


Where = Daemons | Mapping[str, str]
"""Daemons, or the environment of trainers with embedded ones."""


def trainers(where: Where, **more: str) -> dict[str, str]:
    """Their environment."""
    if isinstance(where, Daemons):
        return where.env(**where.environment, **more)
    return {**where, **more}


def save_and_kill(
    where: Where, root: str, steps: str, *, ranks: int = 1, job: str = "test"
) -> None:
    """Saves the steps; then all trainers are killed."""
    environment = trainers(where, ROOT=root, STEPS=steps, MIB="20", PANNIER_JOB=job)
    with start_ranks(SAVING, ranks, environment, torchrun=False) as running:
        for rank in range(ranks):
            running.wait_for("DONE", rank=rank)
        for process in running.processes:
            process.signal(signal.SIGKILL)
        for process in running.processes:
            process.wait(BOUND_S)


def load(where: Where, root: str, step: int, *, ranks: int = 1) -> Any:
    """Loads in new processes, and compares all bits; files and bytes by source, and the text."""
    environment = trainers(where, ROOT=root, STEP=str(step), MIB="20")
    output = run_ranks(LOADING, ranks, environment, torchrun=False).outputs[0]
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    assert found is not None, output
    return (*json.loads(found[1]), output)


def copies(daemons: Daemons) -> list[str]:
    """Checkpoints that the sidecar reports as local copies."""
    return [copy.checkpoint_id for copy in listed(daemons.sidecar_address).local_copies]


@pytest.mark.parametrize(
    ("before", "after", "transport"),
    [
        (2, 2, "mapped"),
        (1, 2, "streamed"),
        *(
            pytest.param(before, after, transport, marks=pytest.mark.extended)
            for before, after in ((1, 1), (2, 1), (1, 2), (2, 2))
            for transport in ("mapped", "streamed")
            if (before, after, transport) not in ((2, 2, "mapped"), (1, 2, "streamed"))
        ),
    ],
)
def test_trainers_that_start_again_on_their_host_read_no_data_from_the_bucket(
    daemons: Daemons,
    server: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    before: int,
    after: int,
) -> None:
    monkeypatch.setenv("PANNIER_TRANSPORT", transport)
    root = f"{ROOT}/{transport}-{before}-{after}"
    save_and_kill(daemons, root, "1 2 3", ranks=before)
    wait_until(lambda: copies(daemons) == [f"{root}/step-3"])
    files, size, text, output = load(daemons, root, 3, ranks=after)
    assert not data_reads(server, root.removeprefix("gs://bucket/"))
    assert files.keys() == {"own spool"}
    assert size["own spool"] >= 20 << 20
    slowest = r"; slowest rank [01] \(node-0\)" if after > 1 else ""
    assert re.fullmatch(rf"LoadResult: \d+ files?: \d+ own spool; [\d.]+ \w+/s{slowest}", text)
    assert re.search(rf"loaded {root}/step-3, [\d.]+ MiB in [\d.]+ s, \d+ files?: ", output)
    # An older one is in the bucket alone, from where one rank reads for all.
    files, _, _, _ = load(daemons, root, 2, ranks=after)
    assert "bucket" in files
    assert "own spool" not in files
    assert data_reads(server, root.removeprefix("gs://bucket/"))


def test_embedded_daemons_that_outlive_the_trainer_have_its_last_checkpoint(
    server: GcsServer, embedded: Path
) -> None:
    root = f"{ROOT}/embedded"
    where = {
        **server.env,
        **{name: os.environ[name] for name in ("PANNIER_RUNTIME_DIR", "PANNIER_SPOOL")},
    }
    # Each start is a job of its own, without a name that stays.
    save_and_kill(where, root, "1 2", job="")
    files, _, _, _ = load(where, root, 2)
    assert files.keys() == {"own spool"}
    assert not data_reads(server, "local/embedded")
    assert pannier("down", "--runtime-dir", str(embedded)).code == 0
    assert not list(Path(os.environ["PANNIER_SPOOL"]).iterdir())
    files, _, _, _ = load(where, root, 2)
    assert files.keys() == {"bucket"}


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_sidecar_that_starts_again_still_has_the_copy(
    daemons: Daemons, server: GcsServer, how: str
) -> None:
    root = f"{ROOT}/restart-{how}"
    save_and_kill(daemons, root, "1 2")
    getattr(daemons.sidecar, how)()
    daemons.sidecar.start()
    wait_until(lambda: copies(daemons) == [f"{root}/step-2"])
    files, _, _, _ = load(daemons, root, 2)
    assert files.keys() == {"own spool"}
    assert not data_reads(server, root.removeprefix("gs://bucket/"))


@pytest.mark.parametrize("transport", ["mapped", "streamed"])
@pytest.mark.parametrize("what", ["content", "length", "stamp"])
def test_a_copy_that_another_process_changed_is_read_from_the_bucket(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, transport: str, what: str
) -> None:
    monkeypatch.setenv("PANNIER_TRANSPORT", transport)
    root = f"{ROOT}/changed-{what}-{transport}"
    save_and_kill(daemons, root, "1")
    for path in (daemons.spool / "0").glob("*.data"):
        if what == "length":
            os.truncate(path, 1 << 20)
            continue
        with path.open("r+b") as file:
            file.seek(
                12 << 20 if what == "content" else -8,
                os.SEEK_SET if what == "content" else os.SEEK_END,
            )
            file.write(b"changed!")
    files, size, _, output = load(daemons, root, 1)
    if what == "stamp" and transport == "streamed":
        # No trainer maps it: there is nothing of the checkpoint in these bytes.
        assert files.keys() == {"own spool"}
        return
    assert files["bucket"] == 1
    assert size["bucket"] > 0
    # The sidecar notices other stamps itself.
    if what == "content":
        assert "is read from storage, not from this host's spool: bytes 8388608 to" in output


def test_a_copy_without_receipts_in_storage_is_read_from_the_bucket(
    daemons: Daemons, server: GcsServer
) -> None:
    """As after a user has removed them: nothing could show that the copy has other bytes."""
    root = f"{ROOT}/unchecked"
    save_and_kill(daemons, root, "1")
    for name in listed_objects(server, root.removeprefix("gs://bucket/")):
        directory = name.rpartition("/")[0]
        if directory.endswith("/receipts"):
            remove(server, directory)
    files, _, _, output = load(daemons, root, 1)
    assert files.keys() == {"bucket"}
    assert "from this host's spool: the receipts of its attempt have no checksums" in output


def test_a_load_whose_sidecar_does_not_answer_reads_the_bucket(
    daemons: Daemons, server: GcsServer
) -> None:
    root = f"{ROOT}/stopped"
    save_and_kill(daemons, root, "1")
    daemons.sidecar.pause()
    try:
        files, _, _, output = load(daemons, root, 1)
    finally:
        daemons.sidecar.resume()
    assert files.keys() == {"bucket"}
    assert "can't be asked for local copies, so storage is read" in output


def test_a_load_without_a_sidecar_reads_the_bucket_and_starts_none(
    daemons: Daemons, server: GcsServer, embedded: Path
) -> None:
    root = f"{ROOT}/alone"
    save_and_kill(daemons, root, "1")
    environment = {"ROOT": root, "STEP": "1", "MIB": "20", **daemons.environment}
    environment["PANNIER_RUNTIME_DIR"] = str(embedded)
    output = run_ranks(LOADING, 1, environment, torchrun=False).outputs[0]
    assert re.search(r'RESULT \[\{"bucket": \d+\}', output), output
    assert not list(embedded.iterdir())


def test_an_overwritten_checkpoint_is_read_from_the_spool_that_has_the_new_one(
    daemons: Daemons, server: GcsServer
) -> None:
    root = f"{ROOT}/again"
    save_and_kill(daemons, root, "1")
    save_and_kill(daemons, root, "1")
    wait_until(lambda: copies(daemons) == [f"{root}/step-1"])
    files, _, _, _ = load(daemons, root, 1)
    assert files.keys() == {"own spool"}
    assert not data_reads(server, root.removeprefix("gs://bucket/"))


def test_saves_of_one_job_never_have_more_than_two_sets_of_files_in_the_spool(
    daemons: Daemons,
) -> None:
    root = f"{ROOT}/many"
    for start in (1, 6):
        save_and_kill(daemons, root, " ".join(map(str, range(start, start + 5))))
        wait_until(lambda: copies(daemons) == [f"{root}/step-{start + 4}"])  # noqa: B023
        sizes = [path.stat().st_size for path in (daemons.spool / "0").glob("*.data")]
        assert sum(sizes) <= 2.05 * (20 << 20), sizes
    wait_until(lambda: listed(daemons.sidecar_address).spool_leased_bytes == 0)
    wait_until(lambda: copies(daemons) == [f"{root}/step-10"])
    shown = pannier("status", "--address", daemons.sidecar_address)
    assert f"here for loads: 20.0 MiB of {root}/step-10\n" in shown.out
    # What made way for saves has newer ones in its place.
    assert "no longer here" not in shown.out


def test_the_copy_survives_many_saves_of_another_job(daemons: Daemons, server: GcsServer) -> None:
    mine, other = f"{ROOT}/mine", f"{ROOT}/other"
    save_and_kill(daemons, mine, "1 2")
    save_and_kill(daemons, other, "1 2 3 4 5", job="other")
    wait_until(lambda: sorted(copies(daemons)) == [f"{mine}/step-2", f"{other}/step-5"])
    for root, step in ((mine, 2), (other, 5)):
        files, _, _, _ = load(daemons, root, step)
        assert files.keys() == {"own spool"}
    assert not data_reads(server, "local/mine") + data_reads(server, "local/other")


def test_starts_without_a_job_name_of_their_own_are_one_job_by_their_root(daemons: Daemons) -> None:
    root = f"{ROOT}/nameless"
    for number in (1, 2, 3):
        save_and_kill(daemons, root, str(number), job=f"job-0000000{number}")
    wait_until(lambda: copies(daemons) == [f"{root}/step-3"])


def test_a_save_that_needs_the_room_takes_it_and_says_so(daemons: Daemons) -> None:
    root = f"{ROOT}/room"
    save_and_kill(daemons, root, "1")
    daemons.sidecar.stop()
    # Room for one set of files and a half.
    daemons.sidecar.arguments += ["--spool-budget", str(32 << 20)]
    daemons.sidecar.start()
    wait_until(lambda: copies(daemons) == [f"{root}/step-1"])
    save_and_kill(daemons, f"{root}-2", "1", job="other")
    wait_until(lambda: copies(daemons) == [f"{root}-2/step-1"])
    assert (
        f"the local copy of {root}/step-1 (20.0 MiB) ends: the spool is full"
        in daemons.sidecar.log()
    )
    (gone,) = listed(daemons.sidecar_address).evicted_copies
    assert (gone.checkpoint_id, gone.reason) == (f"{root}/step-1", "the spool is full")
    shown = pannier("status", "-o", "wide", "--address", daemons.sidecar_address)
    assert re.search(
        rf"no longer here: 20.0 MiB of {root}/step-1: the spool is full, .* ago\n", shown.out
    )
    files, _, _, _ = load(daemons, root, 1)
    assert files.keys() == {"bucket"}
