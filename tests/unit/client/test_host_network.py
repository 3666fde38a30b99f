"""Which processes share a host, and the addresses of hosts."""

import os
import socket
from pathlib import Path

import pytest

from pannier.client.embedded import network
from pannier.common import machine
from pannier.wire.errors import ConfigurationError


def test_a_place_is_the_directory_however_it_is_called(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(one)
    assert network.runtime_dir_id(one) == network.runtime_dir_id(tmp_path / "link")
    # As in containers of one machine, whose kernel and perhaps whose name is the same.
    assert network.runtime_dir_id(one) != network.runtime_dir_id(other)


def test_a_place_is_of_this_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = network.runtime_dir_id(tmp_path)
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "boot")
    assert network.runtime_dir_id(tmp_path) != before


def test_an_address_that_others_can_use_goes_first() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        outside = probe.getsockname()[0]
    assert network.own_address(["127.0.0.1"]) == outside
    assert network.own_address([None, "no such name.invalid", outside]) == outside


def test_loopback_is_better_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ANYWHERE", ())
    assert network.own_address([None, "127.0.0.1"]) == "127.0.0.1"
    assert network.own_address([]) is None


def test_a_port_is_of_this_host() -> None:
    port = network.free_port("127.0.0.1")
    assert 0 < port < 65536
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.7.*PANNIER_LISTEN"):
        network.free_port("192.0.2.7")


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "node-0"])
def test_addresses_are_joined_and_parted(host: str) -> None:
    assert network.split_address(network.join_address(host, 7070)) == (host, 7070)


def test_why_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert network.probe_port(f"127.0.0.1:{server.getsockname()[1]}", 1) == ""
    assert network.probe_port("127.0.0.1:1", 1) == os.strerror(111)


@pytest.mark.parametrize(
    ("local_world_size", "here"),
    [("", False), ("2", False), ("3", True), ("8", True), ("x", False)],
)
def test_what_the_launcher_says(
    local_world_size: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert network.all_ranks_here(3) is here
