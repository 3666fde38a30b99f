"""Certificate files: errors are reported at start, and replaced files are used."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pannier.coordinator.config import CoordinatorConfig
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.sidecar.config import SidecarConfig
from pannier.wire.addresses import channel_options
from pannier.wire.errors import ConfigurationError
from pannier.wire.tls import Tls, open_channel, tls_of
from support.network.certificates import Authority, Files
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def tls(files: Files) -> Tls:
    return Tls(files.cert, files.key, files.ca)


# Files.


def test_good_files_are_taken(authority: Authority) -> None:
    assert not tls(authority.issue("one")).changed()


def test_a_missing_file_is_named(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("one")
    with pytest.raises(ConfigurationError, match=r"--tls-ca=/.*/no\.pem .*No such file"):
        Tls(files.cert, files.key, tmp_path / "no.pem")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(authority: Authority) -> None:
    files = authority.issue("one")
    files.key.chmod(0)
    with pytest.raises(ConfigurationError, match=r"--tls-key=.*Permission denied"):
        tls(files)


def test_anothers_key_is_an_error(authority: Authority) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    with pytest.raises(ConfigurationError, match=r"two\.key is not the key of .*one\.pem"):
        Tls(one.cert, two.key, one.ca)


def test_an_expired_certificate_is_an_error(authority: Authority) -> None:
    with pytest.raises(ConfigurationError, match=r"old\.pem has expired"):
        tls(authority.issue("old", valid_s=-60))


def test_a_key_with_a_passphrase_is_refused_without_asking(authority: Authority) -> None:
    with pytest.raises(ConfigurationError, match=r"one\.key has a passphrase"):
        tls(authority.issue("one", passphrase=b"secret"))


def test_what_is_no_certificate_is_an_error(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("one")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(os.urandom(100))
    for bad in (
        (garbage, files.key, files.ca),
        (files.cert, garbage, files.ca),
        (files.cert, files.key, garbage),
        (files.cert, files.key, files.key),
    ):
        with pytest.raises(ConfigurationError, match="in PEM form"):
            Tls(*bad)


def test_all_three_or_none(authority: Authority) -> None:
    files = authority.issue("one")
    assert tls_of(None, None, None) is None
    with pytest.raises(ConfigurationError, match="--tls-key and --tls-ca are not set"):
        tls_of(files.cert, None, None)


# Addresses.


def sidecar_config(**settings: object) -> SidecarConfig:
    return SidecarConfig(
        coordinator="unix:///c.sock",
        spool=Path("/nowhere"),
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("make", [sidecar_config, CoordinatorConfig])
@pytest.mark.parametrize("setting", ["address", "listen"])
@pytest.mark.parametrize("where", ["0.0.0.0:7070", "[::]:7070", "10.0.0.2:7070", "node-1:7070"])
def test_plaintext_for_other_hosts_takes_an_explicit_word(
    make: type[CoordinatorConfig], setting: str, where: str, authority: Authority
) -> None:
    with pytest.raises(ConfigurationError, match=f"--{setting}=.*--insecure-listen"):
        make(**{setting: where})
    assert make(**{setting: where}, insecure_listen=True).tls is None
    files = authority.issue("one")
    assert make(**{setting: where}, **files.settings).tls is not None


@pytest.mark.parametrize("where", ["127.0.0.1:7070", "[::1]:7070", "localhost:7070"])
def test_loopback_takes_none(where: str) -> None:
    assert CoordinatorConfig(listen=where).tls is None


# Connections.


@contextmanager
def served(files: Files) -> Iterator[str]:
    """Health over TLS; gives the address."""
    address = f"127.0.0.1:{free_port()}"
    server = grpc.server(ThreadPoolExecutor(4), options=server_options())
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    with bind_listeners(server, address, tls=tls(files)):
        server.start()
        try:
            yield address
        finally:
            server.stop(None).wait()


def asked(address: str, files: Files | None) -> str:
    """ "SERVING", or the name of what the call failed with."""
    with open_channel(address, channel_options(), tls(files) if files else None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_only_what_the_ca_signed_is_let_in(authority: Authority, tmp_path: Path) -> None:
    server, client = authority.issue("server"), authority.issue("client")
    other = Authority(tmp_path / "other", "another CA").issue("client")
    with served(server) as address:
        assert asked(address, client) == "SERVING"
        # Takes the server for what it is, but shows what another CA has signed.
        assert asked(address, Files(other.cert, other.key, client.ca)) == "UNAVAILABLE"
        # Shows the right certificate, but doesn't know the server's CA.
        assert asked(address, Files(client.cert, client.key, other.ca)) == "UNAVAILABLE"
        assert asked(address, None) == "UNAVAILABLE"
        with grpc.secure_channel(
            address, grpc.ssl_channel_credentials(client.ca.read_bytes())
        ) as anonymous:
            with pytest.raises(grpc.RpcError) as raised:
                health_pb2_grpc.HealthStub(anonymous).Check(
                    health_pb2.HealthCheckRequest(), timeout=BOUND_S
                )
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert asked(address, client) == "SERVING"


def test_a_certificate_for_another_host_is_refused(authority: Authority) -> None:
    with served(authority.issue("server", host="127.0.0.9")) as address:
        assert asked(address, authority.issue("client")) == "UNAVAILABLE"


def test_replaced_files_are_picked_up_by_a_running_server(
    authority: Authority, tmp_path: Path
) -> None:
    server = authority.issue("server")
    fresh = Authority(tmp_path / "fresh", "a fresh CA")
    with served(server) as address:
        assert asked(address, authority.issue("client")) == "SERVING"
        replacement = fresh.issue("server")
        for old, new in zip(vars(server).values(), vars(replacement).values(), strict=True):
            os.replace(new, old)
        # Authority's file went with the last one.
        client = Files(*vars(fresh.issue("client")).values())
        client.ca = server.ca
        assert asked(address, client) == "SERVING"
        # What the former CA has signed isn't taken any more.
        assert asked(address, authority.issue("client")) == "UNAVAILABLE"


def test_a_bad_replacement_changes_nothing(authority: Authority) -> None:
    server, client = authority.issue("server"), authority.issue("client")
    with served(server) as address:
        server.key.write_bytes(b"half a key")
        assert asked(address, client) == "SERVING"


def test_a_client_learns_that_its_files_were_replaced(authority: Authority) -> None:
    files = authority.issue("client")
    ours = tls(files)
    ours.channel_credentials()
    assert not ours.changed()
    authority.issue("client")
    assert ours.changed()
    ours.channel_credentials()
    assert not ours.changed()
    files.cert.unlink()
    assert not ours.changed()
