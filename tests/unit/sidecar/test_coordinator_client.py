"""Which coordinator a sidecar attaches to: its own, or the next start's when that is dead."""

import json
import time
from pathlib import Path

import pytest

from pannier.common import timeouts
from pannier.sidecar import coordinator_client
from pannier.sidecar.coordinator_client import CoordinatorAddress
from pannier.wire.tls import Tls
from support.network.certificates import Authority

OWN, NEXT = "10.0.0.1:7070", "10.0.0.2:7070"


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(coordinator_client, "time", made)
    return made


def test_the_configured_one_is_tried_for_a_while_before_a_successor(
    clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "successor.json"
    where = CoordinatorAddress(OWN, None, file)
    file.write_text(json.dumps({"coordinator": NEXT}))
    assert not where.refresh()
    where.mark_attached()
    clock.now += 2 * timeouts.SUCCESSION_S
    # It has just been lost.
    assert not where.refresh()
    clock.now += timeouts.SUCCESSION_S - 1
    assert not where.refresh()
    assert where.address == OWN
    clock.now += 1
    assert where.refresh()
    assert where.address == NEXT
    # That one has its time, too.
    file.write_text(json.dumps({"coordinator": "unix:///run/c.sock"}))
    assert not where.refresh()
    clock.now += timeouts.SUCCESSION_S
    assert where.refresh()
    assert where.address == "unix:///run/c.sock"
    clock.now += timeouts.SUCCESSION_S
    assert not where.refresh()


def test_without_a_successor_it_stays(clock: Clock, tmp_path: Path) -> None:
    for file in (None, tmp_path / "none.json"):
        where = CoordinatorAddress(OWN, None, file)
        clock.now += 10 * timeouts.SUCCESSION_S
        assert not where.refresh()
        assert where.address == OWN


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"coordinator": "nowhere"}', '{"coordinator": 7}', "\udcff"]
)
def test_nonsense_is_logged_and_changes_nothing(
    text: str, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "successor.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    where = CoordinatorAddress(OWN, None, file)
    clock.now += timeouts.SUCCESSION_S
    assert not where.refresh()
    assert str(file) in caplog.text


def test_a_successors_certificate_must_be_one(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path / "ca").issue("one")
    file = tmp_path / "successor.json"
    named = {"coordinator": NEXT, "cert": str(files.cert), "ca": str(files.ca)}
    where = CoordinatorAddress(OWN, Tls(files.cert, files.key, files.ca), file)
    clock.now += timeouts.SUCCESSION_S
    file.write_text(json.dumps({**named, "key": str(tmp_path / "no.key")}))
    assert not where.refresh()
    assert "no.key" in caplog.text
    file.write_text(json.dumps({**named, "key": str(files.key)}))
    assert where.refresh()


def test_replaced_certificates_take_a_new_channel(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = authority.issue("one")
    where = CoordinatorAddress(OWN, tls := Tls(files.cert, files.key, files.ca), None)
    tls.channel_credentials()
    assert not where.refresh()
    time.sleep(0.01)
    authority.issue("one")
    assert where.refresh()
