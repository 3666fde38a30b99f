"""The last save of a trainer that ends normally, where its daemons end with it, and where they go on."""

import os
import subprocess
from pathlib import Path

import pytest

from pannier.common import lifetime
from support.actors.hosts import await_true
from support.processes.cli import pannier
from support.processes.daemons import clean_environment
from support.processes.processes import python
from support.processes.stretch import BOUND_S, stretched
from support.storage.gcs_server import GcsServer

BUSY = {"kind": "status", "method": "POST", "path": r"uploadType.*distcp", "status": 503}
"""A store that refuses uploads, so that a save is ingested long before it is committed."""

TRAINER = """
import json, os, torch
from pathlib import Path
from pannier import client

client.prepare({"w": torch.zeros(3 << 20)}, os.environ["ROOT"])
record = Path(os.environ["PANNIER_RUNTIME_DIR"], "up.json")
print("record:", record.read_text())
if "SURVIVE" in os.environ:
    # As where nothing ends them; what this machine's /proc shows doesn't matter here.
    record.write_text(json.dumps({**json.loads(record.read_text()), "ended_by": None}))
client.async_save({"w": torch.ones(3 << 20)}, checkpoint_id=os.environ["ROOT"] + "/last")
if "CLOSE" in os.environ:
    client.close()
"""


def committed(root: str, server: GcsServer) -> bool:
    found = pannier("ls", f"{root}/last", env=server.env)
    return found.code == 0 and "committed" in found.out


def trained(root: str, embedded: Path, server: GcsServer, *prefix: str, **more: str) -> str:
    """What a trainer writes whose last call is a save, and that ends well."""
    finished = subprocess.run(
        [*prefix, *python("-c", TRAINER)],
        env={
            # Without what the machine's own scheduler or runner has set.
            **{
                k: v
                for k, v in clean_environment().items()
                if not lifetime._SCHEDULERS.fullmatch(k)
            },
            **server.env,
            "PANNIER_RUNTIME_DIR": str(embedded),
            "PANNIER_SPOOL": os.environ["PANNIER_SPOOL"],
            "ROOT": root,
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * BOUND_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a PID namespace")
def test_the_last_save_is_committed_before_the_exit_that_ends_a_container(
    embedded: Path, server: GcsServer
) -> None:
    """A PID namespace without any mark of a container, whose first process is the trainer."""
    root = "gs://bucket/container"
    server.fault(kind="delay", method="POST", path=BUSY["path"], seconds=stretched(8), times=1)
    output = trained(root, embedded, server, "unshare", "--pid", "--fork", "--mount-proc")
    assert "pannier: waiting until 12.0 MiB of 1 save are committed: process " in output
    # The kernel has ended the namespace's processes by now.
    assert committed(root, server)
    server.clear()


@pytest.mark.parametrize("end", [{}, {"CLOSE": "1"}], ids=["exit", "close"])
def test_where_daemons_survive_one_line_says_who_commits_the_last_save(
    embedded: Path, server: GcsServer, end: dict[str, str]
) -> None:
    """Also after a preemption, whose loop ends with ``close()``: its operator must see that the step isn't lost."""
    root = f"gs://bucket/laptop{len(end)}"
    server.fault(**BUSY, times=-1)
    output = trained(root, embedded, server, SURVIVE="1", **end)
    supervisor = (embedded / "up.pid").read_text().strip()
    line = f"pannier: handed over last; the daemons (process {supervisor}) commit it\n"
    assert output.count("handed over") == 1
    assert line in output
    assert "waiting until" not in output
    assert not committed(root, server)
    server.clear()
    await_true(lambda: committed(root, server), "the commit")
