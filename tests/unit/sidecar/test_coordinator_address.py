"""Which coordinator a sidecar attaches to: its own, or the next start's when that is gone."""

import json
import time
from pathlib import Path

import pytest

from pannier.sidecar import coordinator_address
from pannier.sidecar.coordinator_address import SUCCEED_S, Whereabouts
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
    monkeypatch.setattr(coordinator_address, "time", made)
    return made


def test_its_own_is_tried_for_a_while_before_a_successor(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "successor.json"
    where = Whereabouts(OWN, None, file)
    file.write_text(json.dumps({"coordinator": NEXT}))
    assert not where.moved()
    where.found()
    clock.now += 2 * SUCCEED_S
    # It has just been lost.
    assert not where.moved()
    clock.now += SUCCEED_S - 1
    assert not where.moved()
    assert where.address == OWN
    clock.now += 1
    assert where.moved()
    assert where.address == NEXT
    # That one has its time, too.
    file.write_text(json.dumps({"coordinator": "unix:///run/c.sock"}))
    assert not where.moved()
    clock.now += SUCCEED_S
    assert where.moved()
    assert where.address == "unix:///run/c.sock"
    clock.now += SUCCEED_S
    assert not where.moved()


def test_without_a_successor_it_stays(clock: Clock, tmp_path: Path) -> None:
    for file in (None, tmp_path / "none.json"):
        where = Whereabouts(OWN, None, file)
        clock.now += 10 * SUCCEED_S
        assert not where.moved()
        assert where.address == OWN


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"coordinator": "nowhere"}', '{"coordinator": 7}', "\udcff"]
)
def test_nonsense_is_told_and_nobody_moves(
    text: str, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "successor.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    where = Whereabouts(OWN, None, file)
    clock.now += SUCCEED_S
    assert not where.moved()
    assert str(file) in caplog.text


def test_a_successors_certificate_must_be_one(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Authority(tmp_path / "ca").issue("one")
    file = tmp_path / "successor.json"
    told = {"coordinator": NEXT, "cert": str(files.cert), "ca": str(files.ca)}
    where = Whereabouts(OWN, Tls(files.cert, files.key, files.ca), file)
    clock.now += SUCCEED_S
    file.write_text(json.dumps({**told, "key": str(tmp_path / "no.key")}))
    assert not where.moved()
    assert "no.key" in caplog.text
    file.write_text(json.dumps({**told, "key": str(files.key)}))
    assert where.moved()


def test_replaced_certificates_take_a_new_channel(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = authority.issue("one")
    where = Whereabouts(OWN, tls := Tls(files.cert, files.key, files.ca), None)
    tls.channel_credentials()
    assert not where.moved()
    time.sleep(0.01)
    authority.issue("one")
    assert where.moved()
