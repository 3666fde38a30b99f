"""Sockets that any user may connect to, each job's in a separate directory that its pods mount.

In: the parent directory, which only this user may enter, so that no other user of the host reaches the
sockets. Out: ``<job>/sidecar.sock``, and one beside it that passes descriptors. A pod may mount the
job's directory writable, and run as root: no link there is followed, and no file is opened. So
sockets are made in the parent directory and moved, no lock lies beside them, and the node's
gateway reaches the job's sidecar by names in the parent directory.
"""

import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc

from pannier.daemon.listeners import make_private_directory, socket_path
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError

NAME: Final = "sidecar.sock"
_ENTERED: Final = 0o711
_CONNECTED: Final = 0o666


def jobs_directory(address: str) -> Path:
    """The parent of the jobs' directories: ``jobs`` beside the sidecar's own socket, ``unix:///path``."""
    return Path(address.removeprefix("unix://")).parent / "jobs"


def job_address(parent: Path, job: str) -> str:
    """The sidecar's address for a job's trainers."""
    return f"unix://{parent}/{job}/{NAME}"


def operator_address(parent: Path, job: str) -> str:
    """The sidecar's address for the node's gateway, which no pod can replace."""
    return f"unix://{parent}/.{job}.grpc"


def http_address(parent: Path, job: str) -> str:
    """Where the sidecar's metrics are for the node's gateway."""
    return f"unix://{parent}/.{job}.http"


def make_parent(parent: Path) -> None:
    """Makes the parent directory with mode 0700. Raises ConfigurationError."""
    try:
        make_private_directory(parent)
        found = parent.stat()
        if found.st_uid == os.geteuid():
            parent.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(f"{parent} can't be made: {error}") from error
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{parent} belongs to user {found.st_uid}, who could put sockets of their own there: choose "
            f"an --address in a directory of user {os.geteuid()}"
        )


def make_directory(parent: Path, job: str) -> Path:
    """Makes the job's directory, which outlives the job: running pods have it mounted.

    Raises ConfigurationError: another user's, or something else, is in its place.
    """
    path = parent / job
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            path.chmod(_ENTERED)
            return path
    except OSError as error:
        raise ConfigurationError(f"{path} can't be made: {error}") from error
    raise ConfigurationError(
        f"{path} is in the way of the job's sockets: it is no directory of user {os.geteuid()}, but of "
        f"user {found.st_uid}; remove it"
    )


@contextmanager
def serving_job(server: grpc.aio.Server, directory: Path) -> Iterator[None]:
    """Binds ``server`` to the job's socket as long as the context lasts.

    Raises ConfigurationError when it can't be bound.
    """
    private = socket_path(operator_address(directory.parent, directory.name))
    assert private is not None
    private.unlink(missing_ok=True)
    where = parse_address(f"unix://{private}", setting="--address")
    try:
        server.add_insecure_port(where)
        made = _temporary_path(directory)
        # A second name of the same socket.
        made.hardlink_to(private)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"can't listen on {where}: {error}") from error
    try:
        with _placed(made, directory / NAME):
            yield
    finally:
        private.unlink(missing_ok=True)


@contextmanager
def job_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket at ``path``, which lies in the job's directory. Raises OSError."""
    made = _temporary_path(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(str(made))
        listener.listen(socket.SOMAXCONN)
        with _placed(made, path):
            yield listener


def _temporary_path(directory: Path) -> Path:
    """A name in the parent directory, which no other user can write; no longer than the socket's."""
    return directory.parent / f".{secrets.token_hex(4)}"


@contextmanager
def _placed(made: Path, path: Path) -> Iterator[None]:
    try:
        made.chmod(_CONNECTED)
        # Replaces an earlier process's socket, a link, or anything else.
        made.rename(path)
    except OSError as error:
        made.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} can't be listened on: {error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
