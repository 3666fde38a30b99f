"""Storage that is out of order, and daemons that try again as long as it can help, and no longer.

Rows of the design's table that want GCS alone: :mod:`test_failure_table`. Spools: not here.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pannier.v1 import save_pb2
from pannier.wire.errors import PannierError, SaveAbortedError
from support.actors.hand import Party
from support.processes.daemons import Daemons
from support.processes.stretch import BOUND_S
from support.processes.watching import ABORTED, COMMITTED, await_save
from support.storage.bucket import generations
from support.storage.gcs_server import GcsServer
from support.storage.s3_server import S3Server

pytestmark = pytest.mark.slow

LARGE = 4 << 20
"""Floats of a rank whose data file goes to S3 in parts."""


@pytest.fixture(scope="module")
def shared_s3() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="module")
def shared_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with GcsServer(tmp_path_factory.mktemp("gcs")) as running:
        yield running


@pytest.fixture(scope="module")
def daemons(
    shared_s3: S3Server, shared_gcs: GcsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemons]:
    environment = {**shared_s3.env, **shared_gcs.env}
    with Daemons(tmp_path_factory.mktemp("storage"), environment=environment) as running:
        yield running


@pytest.fixture
def s3(shared_s3: S3Server) -> Iterator[S3Server]:
    yield shared_s3
    shared_s3.clear()


@pytest.fixture
def gcs(shared_gcs: GcsServer) -> Iterator[GcsServer]:
    yield shared_gcs
    shared_gcs.clear()


@pytest.fixture
def rank(daemons: Daemons, request: pytest.FixtureRequest) -> Iterator[Party]:
    """A job of one rank."""
    incarnation = f"{abs(hash(request.node.name)):x}"
    with Party([daemons.sidecar_address], incarnation=incarnation, words=[LARGE]) as party:
        yield party


def ended(daemons: Daemons, target: str) -> save_pb2.SaveStatus:
    return await_save(
        daemons.coordinator_address,
        target,
        lambda status: status.state in (COMMITTED, ABORTED),
        timeout=BOUND_S,
    )


FLEETING = {
    "429": {"kind": "status", "status": 429, "code": "TooManyRequests"},
    "503": {"kind": "status", "status": 503, "code": "SlowDown"},
    "500": {"kind": "status", "status": 500, "code": "InternalError"},
    "reset": {"kind": "reset"},
    "lost": {"kind": "lost"},
    "corrupt": {"kind": "corrupt"},
}


@pytest.mark.parametrize(
    "trouble",
    [
        *("503", "reset", "corrupt"),
        *(pytest.param(each, marks=pytest.mark.extended) for each in ("429", "500", "lost")),
    ],
)
def test_a_part_that_s3_did_not_take_is_sent_once_more(
    daemons: Daemons, s3: S3Server, rank: Party, trouble: str
) -> None:
    target = f"s3://bucket/fleeting-{trouble}/step-1"
    path = f"fleeting-{trouble}/step-1/__"
    s3.fault(method="PUT", path=rf"{path}.*partNumber=1\b", **FLEETING[trouble])
    rank.save(target, 1)
    status = ended(daemons, target)
    assert status.state == COMMITTED, status
    first = [
        found
        for method, found in s3.requests()
        if method == "PUT" and path in found and "partNumber=1&" in found
    ]
    assert len(first) == 2, first
    # No layer below us retries, but for aiohttp on a connection that was kept open.
    counted = [0, 1] if trouble in ("reset", "lost") else [1]
    assert [each.retries in counted for each in status.ranks] == [True]
    assert s3.sessions() == []


def test_s3_that_refuses_ends_the_save_at_once_and_nothing_is_left(
    daemons: Daemons, s3: S3Server, rank: Party
) -> None:
    target = "s3://bucket/refused/step-1"
    s3.fault(
        kind="status",
        method="PUT",
        path=r"refused/step-1/__.*partNumber=2\b",
        status=400,
        code="ExpiredToken",
        message="The provided token has expired.",
        times=-1,
    )
    # It may have failed before all of it is here.
    with suppress(PannierError):
        rank.save(target, 1)
    status = ended(daemons, target)
    assert status.state == ABORTED
    (failure,) = status.failures
    assert (failure.rank, failure.kind) == (0, save_pb2.FAILURE_KIND_STORAGE)
    assert "The provided token has expired." in failure.message
    # Other credentials are looked for, once.
    assert s3.faults()[0]["hits"] == 2
    deadline = time.monotonic() + BOUND_S
    while s3.sessions() or not all("/decision" in name for name in s3.names("refused/step-1/")):
        assert time.monotonic() < deadline, (s3.sessions(), s3.names("refused/step-1/"))
        time.sleep(0.05)
    s3.clear()
    rank.save("s3://bucket/refused/step-2", 2)
    assert ended(daemons, "s3://bucket/refused/step-2").state == COMMITTED


def test_a_store_that_does_not_take_the_plan_is_named_at_the_deadline(
    daemons: Daemons, gcs: GcsServer, rank: Party
) -> None:
    rank.save("gs://bucket/unplanned/step-0", 1)
    assert ended(daemons, "gs://bucket/unplanned/step-0").state == COMMITTED
    gcs.fault(kind="status", method="POST", status=503, times=-1, message="backend is busy")
    target, hand = "gs://bucket/unplanned/step-1", rank.hands[0]
    began = time.monotonic()
    with pytest.raises(SaveAbortedError, match="backend is busy"):
        hand.agree(hand.context(target, 2), timeout_s=4)
    assert time.monotonic() - began < 4 + BOUND_S
    gcs.clear()
    # Whether the plan was taken was in doubt: the decision shows it.
    assert ended(daemons, target).state == ABORTED
    assert not [name for name in generations(gcs, "unplanned/step-1") if "decision" not in name]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for one save and a little more."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", f"size={LARGE * 4 * 3 // 2}", "pannier-test", str(place))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=20)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)


def files(place: Path) -> list[str]:
    found: list[str] = []
    for directory, _, names in os.walk(place):
        found += [os.path.join(directory, name) for name in names]
    return found


def test_a_full_disk_fails_its_save_and_the_checkpoint_before_stays(
    daemons: Daemons, small: Path, rank: Party
) -> None:
    first, second, third = (f"{small}/run/step-{number}" for number in (1, 2, 3))
    rank.save(first, 1)
    assert ended(daemons, first).state == COMMITTED
    # Its upload, which follows the stream, ends the stream.
    with suppress(PannierError):
        rank.save(second, 2)
    status = ended(daemons, second)
    assert status.state == ABORTED
    (failure,) = status.failures
    assert failure.kind == save_pb2.FAILURE_KIND_STORAGE
    assert "No space left" in failure.message
    assert (small / "run/step-1/.metadata").exists()
    # What was half-written gives its room back.
    for name in files(small / "run/step-1"):
        with suppress(FileNotFoundError):
            os.unlink(name)
    rank.save(third, 3)
    assert ended(daemons, third).state == COMMITTED, status


def test_a_disk_that_becomes_read_only_is_said_at_once(
    daemons: Daemons, small: Path, rank: Party
) -> None:
    target = f"{small}/run/step-1"
    plans = rank.agree(target, 1)
    mount("-o", "remount,ro", str(small))
    with suppress(PannierError):
        rank.ingest(target, 1, plans)
    doubt = save_pb2.SAVE_STATE_IN_DOUBT
    status = await_save(
        daemons.coordinator_address, target, lambda save: save.state in (doubt, ABORTED)
    )
    # Nothing can be decided there, so nothing is reported as failed.
    assert status.state == doubt
    assert "ead-only file system" in status.waiting_on.text
    mount("-o", "remount,rw", str(small))
    status = ended(daemons, target)
    assert status.state == ABORTED
    assert "ead-only file system" in status.failures[0].message
