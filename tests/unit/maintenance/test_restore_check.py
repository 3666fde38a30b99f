"""The check of ``pannier doctor`` that counts the files of the newest checkpoint by place."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pannier.coordinator.config import CoordinatorConfig
from pannier.coordinator.diagnosis import CoordinatorDiagnosis
from pannier.coordinator.saves.participants import SidecarPeer
from pannier.v1 import diagnosis_pb2
from support.storage.checkpoints import write_attempt

ATTEMPT = "i1-aa-g1a2b3c4d-s1"


def found(root: Path, peers: Sequence[SidecarPeer]) -> str:
    diagnosis = CoordinatorDiagnosis(CoordinatorConfig(), lambda: False, lambda: peers)
    answer = asyncio.run(diagnosis.Diagnose(diagnosis_pb2.DiagnoseRequest(root=str(root)), None))
    (check,) = [each for each in answer.checks if each.name == "restore"]
    return check.found


def holder(host: str, files: int, *, replicas: bool) -> SidecarPeer:
    peer = SidecarPeer(host)
    peer.copies.copies.add(attempt=ATTEMPT, files=files, bytes=1024)
    peer.copies.peer_address = f"{host}:7"
    peer.failure_domain = "rack" if replicas else ""
    return peer


@pytest.mark.parametrize(
    ("counts", "replicas", "rest"),
    [
        ((6, 5), False, "1 in storage alone"),
        ((6, 5), True, "1 to 6 in storage alone, as several hosts may have the same replicas"),
        ((6, 6, 6), True, "0 to 6 in storage alone, as several hosts may have the same replicas"),
        # No other host has any.
        ((6,), True, "6 in storage alone"),
        ((12, 6), True, "0 in storage alone"),
        ((), True, "all in storage alone"),
    ],
)
def test_files_that_two_hosts_may_have_are_not_counted_twice(
    tmp_path: Path, counts: Sequence[int], replicas: bool, rest: str
) -> None:
    write_attempt(tmp_path / "step-1", ATTEMPT, ranks=6, files=2, size=100)
    peers = [
        holder(f"node-{number}", count, replicas=replicas) for number, count in enumerate(counts)
    ]
    text = found(tmp_path, peers)
    assert text.startswith("step-1, the newest checkpoint, 12 files, ")
    assert text.endswith(rest)
    assert text.count("6 (1.0 KiB) in the spool of node-") == counts.count(6)
