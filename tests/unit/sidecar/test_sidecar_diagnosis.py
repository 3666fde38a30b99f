"""``pannier doctor`` at a sidecar: what is wrong is a failed check, never an error of the call."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from pannier.common import timeouts
from pannier.v1 import diagnosis_pb2
from pannier.wire.errors import UnavailableError
from support.actors.hosts import Host, running_host


@pytest.fixture
def host() -> Iterator[Host]:
    with running_host() as made:
        made.start()
        yield made


def diagnose(host: Host) -> diagnosis_pb2.DiagnoseResponse:
    return host.loop.run(host.sidecar.diagnosis.diagnose(diagnosis_pb2.DiagnoseRequest()))


@pytest.mark.parametrize(("call", "number"), [("stat", errno.EACCES), ("fstat", errno.ESTALE)])
def test_a_spool_whose_file_system_fails_is_a_failed_check(
    host: Host, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    spool, real = host.sidecar.spool, getattr(os, call)

    def fail(what: Any, **more: Any) -> Any:
        if what in (spool.directory, spool._directory_fd):
            raise OSError(number, os.strerror(number))
        return real(what, **more)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        checks = diagnose(host).checks
    (found,) = (each for each in checks if each.name == "spool")
    assert found.result == diagnosis_pb2.CHECK_RESULT_FAILED
    assert f"the spool {spool.directory} can't be used: [Errno {number}]" in found.found
    assert "does its file system respond" in found.hint


def test_the_coordinator_has_the_time_of_a_check_and_some_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    async def refuse(request: diagnosis_pb2.DiagnoseRequest, timeout_s: float) -> None:
        given.append(timeout_s)
        raise UnavailableError("no")

    monkeypatch.setattr(timeouts, "DOCTOR_S", 7.0)
    monkeypatch.setattr(host.sidecar._coordinator, "diagnose", refuse)
    diagnose(host)
    assert given == [7.0 + timeouts.DOCTOR_SIDECAR_S]
