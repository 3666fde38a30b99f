"""Settings: every wrong one is an error that names the variable and its value."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pannier.client.config import check_timeout, load_settings
from pannier.wire.errors import ConfigurationError, InvalidRequestError


def test_defaults_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANNIER_SIDECAR", raising=False)
    settings = load_settings()
    assert settings.embedded
    assert (settings.plan_timeout, settings.save_timeout) == (300, 3600)
    assert settings.max_in_flight == 2


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANNIER_SIDECAR", "unix:///run/pannier/sidecar.sock")
    monkeypatch.setenv("PANNIER_PLAN_TIMEOUT", "12.5")
    monkeypatch.setenv("PANNIER_RUNTIME_DIR", "/tmp/somewhere")
    monkeypatch.setenv("PANNIER_SPOOL", "")
    settings = load_settings()
    assert settings.sidecar == "unix:///run/pannier/sidecar.sock"
    assert settings.plan_timeout == 12.5
    assert settings.runtime_dir == Path("/tmp/somewhere")
    assert settings.spool is None
    assert not settings.embedded


def test_overrides_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANNIER_MAX_IN_FLIGHT", "3")
    assert load_settings(max_in_flight=4).max_in_flight == 4


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PANNIER_SIDECAR", "somewhere", "neither unix:///path nor host:port"),
        ("PANNIER_COORDINATOR", "host:99999", "neither unix:///path nor host:port"),
        ("PANNIER_LISTEN", "unix:///run/c.sock", "as the other hosts reach it"),
        ("PANNIER_LISTEN", "0.0.0.0:7070", "as the other hosts reach it"),
        ("PANNIER_LISTEN", "[::]:7070", "as the other hosts reach it"),
        ("PANNIER_LISTEN", "node-0", "neither unix:///path nor host:port"),
        ("PANNIER_JOB", "my job", "not valid"),
        ("PANNIER_TRANSPORT", "pigeon", "use auto, mapped or streamed"),
        ("PANNIER_PLAN_TIMEOUT", "soon", "valid number"),
        ("PANNIER_SAVE_TIMEOUT", "0", "greater than 0"),
        ("PANNIER_MAX_IN_FLIGHT", "0", "greater than or equal to 1"),
        ("PANNIER_SPOOL", "spool", "absolute path"),
        ("PANNIER_RUNTIME_DIR", "/" + "long" * 40, "shorter directory"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as raised:
        load_settings()
    assert f"{name}={value!r}" in str(raised.value)
    assert says in str(raised.value)


def test_a_wrong_override_is_named() -> None:
    with pytest.raises(ConfigurationError, match="max_in_flight='many'"):
        load_settings(max_in_flight="many")
    with pytest.raises(ConfigurationError, match="no setting 'sidecart'"):
        load_settings(sidecart="x")


@pytest.mark.parametrize(
    "timeout", ["60", b"60", [60], timedelta(seconds=60), float("nan"), 0, 8 * 86400]
)
def test_a_timeout_that_is_no_number_of_seconds_is_named(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"timeout={timeout!r}: give seconds")):
        check_timeout(timeout)
