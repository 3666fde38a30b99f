"""Another user of this machine, who tries to connect to a daemon's socket. Takes root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_UID = 65534

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user to be refused as one"
)

_CODE = """
import os, socket, sys
path, user = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(user)
os.setuid(user)
try:
    socket.socket(socket.AF_UNIX).connect(path)
except PermissionError:
    print("denied")
else:
    print("connected")
"""


def may_connect(path: Path, user: int = OTHER_UID) -> bool:
    """Whether the kernel lets ``user`` connect to the unix socket; False: EACCES."""
    # Not with subprocess' own `user`, who may have no right to execute our interpreter.
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CODE, str(path), str(user)],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return {"connected": True, "denied": False}[done.stdout.strip()]
