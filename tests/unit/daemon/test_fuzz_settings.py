"""Settings from flags and variables, fuzzed: taken, or refused with the setting's name."""

import socket
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pannier.cli.options import Address, JsonObject, Location, Seconds, Size
from pannier.client.config import Settings, load_settings
from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon.settings import DaemonSettings
from pannier.sidecar.config import SidecarConfig
from pannier.wire.addresses import parse_address
from pannier.wire.errors import ConfigurationError
from support.fuzzing import FUZZ, ODD_NAMES, accepted, names, places

words = st.one_of(
    names,
    places,
    st.sampled_from(
        ["nan", "inf", "-inf", "1e400", "-1", "0", "1_000", "9" * 400, "0x10", "１２", "true"]
    ),
    st.sampled_from(["[" * 100_000, '{"a":' * 5000, '{"a":' + "9" * 5000 + "}", "1 2 x", "{}"]),
)
addresses = st.one_of(
    names,
    st.builds("unix:///{}/{}".format, names, names),
    st.builds("{}:{}".format, names, st.one_of(st.integers(-1, 70_000), names)),
    st.sampled_from(["[::1]:80", "[::::]:1", "localhost:٣", "a:0", "unix:", "unix:a", "0:1\n"]),
)


@FUZZ
@given(text=addresses)
@example(text="unix:///a\0b")
@example(text="unix:///\ud800")
@example(text="localhost:٣")
@example(text="unix:///" + "a" * 10**6)
def test_an_address_is_refused_by_name_or_one_that_a_socket_takes(text: str) -> None:
    address, refusal = text, "--listen="
    try:
        address = parse_address(text, setting="--listen")
    except ConfigurationError as error:
        refusal, text = str(error), ""
    assert refusal.startswith("--listen=")
    assert text in ("", address)
    if not text:
        return
    if not text.startswith("unix:"):
        assert text.isascii()
        assert 0 < int(text.rpartition(":")[2]) < 65536
    else:
        with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError):  # noqa: PT011
            # Nothing listens there, but it is a path.
            probe.connect(text.removeprefix("unix://") + ".absent"[: 107 - len(text)])


@FUZZ
@given(text=words)
@pytest.mark.parametrize(
    "type_", [Size(), Seconds(), Seconds(zero=True), Address(), JsonObject(), Location()]
)
def test_a_flag_is_taken_or_refused_as_click_does(type_: Any, text: str) -> None:
    try:
        value = type_.convert(text, None, None)
    except click.ClickException:
        return
    if isinstance(type_, Size):
        assert 0 < value < 1 << 63
    elif isinstance(type_, Seconds):
        assert 0 <= value < float("inf")


_FIELDS = sorted(Settings.model_fields)


@FUZZ
@given(name=st.sampled_from(_FIELDS), value=words)
@example(name="spool", value="/\0")
@example(name="allow_uid", value="٣")
@example(name="plan_timeout", value="nan")
def test_a_clients_variable_is_taken_or_refused_by_name(name: str, value: str) -> None:
    variable = "PANNIER_" + name.upper()
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv(variable, value)
        except ValueError:
            return  # not even a shell could
        refusal = variable
        try:
            settings = load_settings()
            assert settings.trusted_uids
            assert 0 < settings.plan_timeout <= 86400
        except ConfigurationError as error:
            refusal = str(error)
        assert variable in refusal


@FUZZ
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "address": addresses,
            "listen": addresses,
            "host": names,
            "allow": st.lists(places, max_size=3).map(tuple),
            "allow_uid": st.lists(st.integers(-2, 1 << 33), max_size=3).map(tuple),
            "insecure_listen": st.booleans(),
        },
    ),
    times=st.floats(),
    number=st.integers(-1, 1 << 70),
)
@example(values={"host": "a" * 300}, times=1.0, number=1)
@example(values={"allow": ("relative",)}, times=1.0, number=1 << 30)
def test_a_daemons_settings_are_taken_or_refused(
    values: dict[str, Any], times: float, number: int
) -> None:
    made: list[DaemonSettings] = [
        *accepted(
            SidecarConfig,
            coordinator="unix:///c.sock",
            spool=Path("/nowhere"),
            grace_s=times,
            idle_exit_s=times,
            spool_budget=number,
            **values,
        ),
        *accepted(CoordinatorConfig, grace_superseded_s=times, suspect_after_s=1, **values),
    ]
    for config in made:
        assert config.host.isprintable()
        assert all("://" in root or root.startswith("/") for root in config.allow)


@pytest.mark.parametrize("root", ["relative", "", "gs://", "http://x/y", "/a/../b", "/\ud800"])
def test_a_root_that_is_no_place_is_refused_at_start(root: str) -> None:
    for config in (
        lambda: SidecarConfig(coordinator="unix:///c.sock", spool=Path("/n"), allow=(root,)),
        lambda: CoordinatorConfig(allow=(root,)),
    ):
        with pytest.raises(ConfigurationError, match="--allow "):
            config()


def test_the_odd_names_are_odd() -> None:
    assert len(set(ODD_NAMES)) == len(ODD_NAMES)
