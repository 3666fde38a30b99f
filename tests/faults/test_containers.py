"""Containers with one /dev/shm (--ipc=host, systemd's PrivateTmp), played by mount namespaces."""

import os
import subprocess
from pathlib import Path

import pytest

from pannier.wire.version import WIRE_VERSION
from support.processes.daemons import clean_environment
from support.processes.processes import python
from support.processes.stretch import BOUND_S

MACHINE = """
mount -t tmpfs tmpfs /dev/shm
for name in one two; do
  NAME=$name unshare --mount sh -c 'mount -t tmpfs tmpfs "$PANNIER_RUNTIME_DIR" && exec "$@"' sh "$@" || exit 1
done
"""
"""A machine of its own, so that its processes end with it and this machine's /dev/shm isn't used."""

TRAINER = """
import os, torch
from pathlib import Path
from pannier import client

name = os.environ["NAME"]
client.save({"w": torch.ones(1 << 20)}, checkpoint_id=f"/dev/shm/run-{name}/step-1")
print(name, "saved beside", sorted(p.name for p in Path("/dev/shm").glob("pannier-*")), flush=True)
os._exit(0)  # its daemons go on, and keep their spool
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts")
def test_two_containers_that_share_memory_save_at_the_same_time(sockets: Path) -> None:
    """Both have the same user and the same path of the runtime directory."""
    outer = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {**clean_environment(), "PANNIER_RUNTIME_DIR": str(sockets)}
    environment.pop("PANNIER_SPOOL", None)
    finished = subprocess.run(
        [*outer, "sh", "-c", MACHINE, "sh", *python("-c", TRAINER)],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * BOUND_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    assert f"one saved beside ['pannier-0-v{WIRE_VERSION}']" in finished.stdout
    assert (
        f"two saved beside ['pannier-0-v{WIRE_VERSION}', 'pannier-0-v{WIRE_VERSION}-2']"
        in finished.stdout
    )
