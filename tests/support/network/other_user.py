"""Another user of this machine, who speaks raw HTTP/2 to a daemon's socket. Takes root."""

import os
import struct
import subprocess
import sys

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user to be refused as one"
)

_CODE = """
import os, socket, sys, time
path, said, count, wait, user = sys.argv[1:]
said, count, wait, user = bytes.fromhex(said), int(count), float(wait), int(user)
os.setgroups([])
os.setgid(user)
os.setuid(user)
answers = []
for _ in range(count):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    try:
        connection.connect(path)
        connection.sendall(said)
        if wait:
            time.sleep(wait)
            connection.setblocking(False)
            answers.append(connection.recv(65536))
        else:
            while more := connection.recv(65536):
                answers.append(more)
    except PermissionError:
        answers.append(b"denied")
    except OSError:
        pass
    connection.close()
sys.stdout.buffer.write(b"".join(answers))
"""


def call(method: str) -> bytes:
    """A whole connection: one call with an empty message."""
    headers = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(4, 0, 0, b"")
        + _frame(1, 4, 1, headers)
        + _frame(0, 1, 1, bytes(5))
    )


def speak(path: str, said: bytes, *, user: int = NOBODY, count: int = 1, wait: float = 0) -> bytes:
    """What ``user`` hears who connects, says this, and hangs up.

    Args:
        count: times this is done.
        wait: seconds before hanging up; 0: when the daemon has hung up.
    """
    # Not by subprocess' own means: that user may not even read our interpreter.
    words = [path, said.hex(), str(count), str(wait), str(user)]
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CODE, *words],
        cwd="/",
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return done.stdout


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )
