"""``pannier doctor``: checks everything that a save from this host needs, each part by trying it."""

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from pannier.cli import output
from pannier.cli.errors import NEGATIVE, UNREACHABLE
from pannier.cli.options import Location, Seconds, json_option, storage_options
from pannier.cli.status_client import (
    daemon_option,
    embedded_sidecars,
    token_metadata,
    translate_rpc_errors,
)
from pannier.common import timeouts
from pannier.common.cgroup import memory_limit
from pannier.common.daemon_process import accepts
from pannier.daemon import doctor_checks
from pannier.maintenance.restore_check import check_restore
from pannier.v1 import diagnosis_pb2, diagnosis_pb2_grpc
from pannier.wire import addresses, errors
from pannier.wire.auth_token import Metadata
from pannier.wire.tls import open_channel, tls_of
from pannier.wire.version import ONE_VERSION, WIRE_VERSION, package_version

_SHOWN = ("pannier", "torch", "torch_xla", "grpcio", "protobuf", "fsspec", "gcsfs", "s3fs")


@click.command("doctor")
@click.argument("root", type=Location(), required=False)
@daemon_option
@storage_options
@click.option(
    "--timeout",
    type=Seconds(),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for storage.",
)
@json_option
def command(
    *,
    root: str | None,
    address: str | None,
    storage_options: dict[str, Any],
    timeout: float,
    as_json: bool,
    token_file: Path | None,
    **tls: Path | None,
) -> None:
    """Check everything that a save from this host needs. Run it where the trainer runs, as its user.

    With ROOT, the directory or URL that checkpoints go to, each daemon writes,
    replaces, reads, lists and removes a small object there with its own rights. Where
    no embedded daemon runs yet, this process does so: a trainer would start
    the daemons with the same rights. Then "restore" says what a load of the newest
    checkpoint below ROOT would use: the sidecar how many of its files are in this
    host's spool, the coordinator how many are in those of all attached hosts.

    Exit status: 0 no check failed; 1 a check failed; 3 a configured
    daemon doesn't respond.

    The JSON is a stable contract: "checks", each with "of" (here, sidecar,
    coordinator), "name", "result" (ok, warning, failed), "found" and "hint".
    """
    embedded = address is None
    address = address or embedded_sidecars()[0]
    absent = address.startswith("unix:") and not (
        # A daemon that was killed leaves its socket.
        accepts(address) if embedded else os.path.exists(_path(address))
    )
    checks = [("here", check) for check in _here(address, absent=embedded and absent)]
    code = 0
    if absent:
        if not embedded:
            code = UNREACHABLE
        elif root is not None:
            checks += [("here", check) for check in _try(root, storage_options, timeout)]
    elif all(check.result != diagnosis_pb2.CHECK_RESULT_FAILED for _, check in checks):
        metadata = token_metadata(token_file)
        try:
            answer = _ask(address, tls, metadata, root, timeout)
        except errors.PannierError as error:
            # A daemon that rejects the token is reachable.
            refused = isinstance(error, errors.UnauthenticatedError)
            code = NEGATIVE if refused else UNREACHABLE
            checks.append(("here", _unreachable(error)))
        else:
            checks += [("here", check) for check in _of_answer(address, answer)]
            checks += [(answer.daemon, check) for check in answer.checks]
            checks += [("coordinator", check) for check in answer.coordinator.checks]
    if code == 0 and any(c.result == diagnosis_pb2.CHECK_RESULT_FAILED for _, c in checks):
        code = NEGATIVE
    _show(checks, as_json=as_json)
    click.get_current_context().exit(code)


def _here(address: str, *, absent: bool) -> Iterator[diagnosis_pb2.Check]:
    """Checks that need no daemon.

    Args:
        absent: no embedded daemon runs.
    """
    found = {}
    for name in _SHOWN:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    yield doctor_checks.ok("versions", ", ".join(f"{name} {v}" for name, v in found.items()))
    if (limit := memory_limit()) is not None:
        # Of a trainer here, and of the daemons that it would start.
        yield doctor_checks.ok("memory", str(limit))
    if not address.startswith("unix:"):
        yield doctor_checks.ok("address", f"{address}, over TCP")
        return
    if absent:
        yield doctor_checks.ok(
            "address",
            f"{address}: no daemon listens there yet; the first trainer starts the embedded daemons",
        )
        return
    path = _path(address)
    try:
        status = path.lstat()
    except FileNotFoundError:
        yield doctor_checks.failed(
            "address",
            f"{address}: no such socket",
            "start the sidecar (pannier sidecar), or correct PANNIER_SIDECAR",
        )
        return
    except OSError as error:
        yield doctor_checks.failed(
            "address", f"{address}: {error}", "check the permissions of its directory"
        )
        return
    mode = stat.S_IMODE(status.st_mode)
    described = f"{address}, mode {mode:04o} of user {status.st_uid}"
    if not stat.S_ISSOCK(status.st_mode):
        yield doctor_checks.failed(
            "address", f"{described}: not a socket", "correct PANNIER_SIDECAR"
        )
    elif status.st_uid not in (0, os.geteuid()) and str(status.st_uid) not in (
        os.environ.get("PANNIER_ALLOW_UID", "").split()
    ):
        yield doctor_checks.failed(
            "address",
            f"{described}, neither this user's ({os.geteuid()}) nor root's: trainers refuse it",
            f"PANNIER_ALLOW_UID={status.st_uid} trusts that user",
        )
    else:
        yield doctor_checks.ok("address", described)


def _of_answer(
    address: str, answer: diagnosis_pb2.DiagnoseResponse
) -> Iterator[diagnosis_pb2.Check]:
    """Checks of the sidecar's version and of the transport to it."""
    of = f"{answer.daemon} {answer.version} on {answer.host}, protocol {answer.wire_version}"
    if answer.wire_version != WIRE_VERSION:
        yield doctor_checks.failed(
            "protocol",
            f"{of}; here {package_version()}, protocol {WIRE_VERSION}",
            ONE_VERSION,
        )
    else:
        yield doctor_checks.ok("protocol", of)
    # With --jobs, trainers use the sockets of their jobs, not this one.
    if answer.daemon == "sidecar" and all(check.name != "jobs" for check in answer.checks):
        yield _transport(address, answer.descriptors)


def _transport(address: str, descriptors: str) -> diagnosis_pb2.Check:
    """The transport that a trainer would use, by the client's rules (README, "Deploy")."""
    wanted = os.environ.get("PANNIER_TRANSPORT", "auto")
    reason = ""
    if wanted == "streamed":
        reason = "PANNIER_TRANSPORT=streamed"
    elif not address.startswith("unix:"):
        reason = "the sidecar is reached over TCP"
    elif not descriptors:
        reason = "the sidecar passes no descriptors"
    else:
        path = _path(address).with_name(descriptors)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError as error:
                reason = f"can't connect to {path}: {error}"
    if not reason:
        return doctor_checks.ok("transport", "mapped: trainer and sidecar share the spool's memory")
    hint = "bytes go through a gRPC stream, which takes a core while a save is handed over"
    if wanted == "mapped":
        return doctor_checks.failed(
            "transport", f"streamed: {reason}", "PANNIER_TRANSPORT=mapped forbids it"
        )
    if wanted == "streamed":
        return doctor_checks.ok("transport", f"streamed: {reason}")
    return doctor_checks.warning("transport", f"streamed: {reason}", hint)


def _ask(
    address: str,
    tls: dict[str, Path | None],
    metadata: Metadata,
    root: str | None,
    timeout: float,
) -> diagnosis_pb2.DiagnoseResponse:
    secured = tls_of(tls["tls_cert"], tls["tls_key"], tls["tls_ca"])
    request = diagnosis_pb2.DiagnoseRequest(root=root or "", timeout_s=timeout)
    with open_channel(address, addresses.channel_options(), secured) as channel:
        stub: Any = diagnosis_pb2_grpc.DiagnosisStub(channel)
        with translate_rpc_errors(address):
            answer: diagnosis_pb2.DiagnoseResponse = stub.Diagnose(
                request, timeout=timeout + timeouts.DOCTOR_ALL_S, metadata=metadata
            )
    return answer


def _unreachable(error: errors.PannierError) -> diagnosis_pb2.Check:
    if isinstance(error, errors.UnauthenticatedError):
        return doctor_checks.failed(
            "token", str(error), "each job has a socket and a token of its own (PANNIER_SIDECAR)"
        )
    return doctor_checks.failed(
        "daemon",
        str(error),
        "is it running (see its log), and are its address and, on TCP, its CA right?",
    )


def _try(root: str, options: dict[str, Any], timeout: float) -> Iterator[diagnosis_pb2.Check]:
    target = asyncio.run(doctor_checks.check_target(root, (), options, timeout))
    yield target
    if target.result == diagnosis_pb2.CHECK_RESULT_OK:
        yield asyncio.run(check_restore(root, options, timeout, lambda _: ()))


def _path(address: str) -> Path:
    return Path(address.removeprefix("unix://"))


def _show(checks: list[tuple[str, diagnosis_pb2.Check]], *, as_json: bool) -> None:
    def result(check: diagnosis_pb2.Check) -> str:
        name: str = diagnosis_pb2.CheckResult.Name(check.result)
        return name.removeprefix("CHECK_RESULT_").lower()

    if as_json:
        fields = [
            {
                "of": of,
                "name": check.name,
                "result": result(check),
                "found": check.found,
                "hint": check.hint,
            }
            for of, check in checks
        ]
        output.print_json({"checks": fields})
        return
    signs = {
        "ok": Text("✓", "green"),
        "warning": Text("!", "yellow"),
        "failed": Text("✗", "red"),
    }
    lines = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for of, check in checks:
        found = Text(check.found)
        if check.hint:
            found.append(f"\n{check.hint}", "dim")
        lines.add_row(signs.get(result(check), Text("?")), of, check.name, found)
    output.show(lines)
