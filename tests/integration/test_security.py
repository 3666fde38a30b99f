"""Who is let in, on real daemons: users on unix sockets, certificates on TCP."""

import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from pannier.cli.status_client import StatusClient
from pannier.client import Client
from pannier.client.config import load_settings
from pannier.v1 import status_pb2, status_pb2_grpc
from pannier.wire.errors import ConfigurationError, UnavailableError
from support.network.certificates import Authority, Files
from support.network.other_user import may_connect, needs_root
from support.processes.cli import pannier
from support.processes.daemons import Daemons
from support.processes.ranks import free_port
from support.processes.stretch import BOUND_S


class Secured:
    """A coordinator and a sidecar that speak over TCP with TLS, to each other and to clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "ca")
        self.client = self.authority.issue("client")
        self.coordinator = f"127.0.0.1:{free_port()}"
        self.sidecar = f"127.0.0.1:{free_port()}"
        listen = ["--listen", self.coordinator, *self.authority.issue("coordinator").flags]
        carry = ["--listen", self.sidecar, "--coordinator", self.coordinator]
        self.daemons = Daemons(
            directory,
            coordinator_arguments=listen,
            sidecar_arguments=[*carry, *self.authority.issue("sidecar").flags],
        )

    def save(self, files: Files | None, to: Path) -> None:
        """One save through the sidecar's TCP address."""
        settings = load_settings(
            sidecar=self.sidecar, job="test", **(files.settings if files else {})
        )
        with Client(settings) as client:
            client.save({"w": torch.arange(1000)}, checkpoint_id=str(to), no_dist=True)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"))
    with made.daemons:
        yield made


def test_a_save_commits_over_tls_from_end_to_end(secured: Secured, tmp_path: Path) -> None:
    secured.save(secured.client, tmp_path / "step-1")
    assert (tmp_path / "step-1" / ".metadata").exists()
    for address in (secured.sidecar, secured.coordinator):
        result = pannier("status", "--address", address, "--json", *secured.client.flags)
        assert result.code == 0, result
        assert str(tmp_path / "step-1") in result.out
        result = pannier("watch", "--address", address, env=secured.client.environment)
        assert result.code == 0, result


def test_no_certificate_plaintext_and_another_ca_are_refused(
    secured: Secured, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other", "another CA").issue("client")
    pretender = Files(stranger.cert, stranger.key, secured.client.ca)
    with pytest.raises(UnavailableError, match=secured.sidecar):
        secured.save(pretender, tmp_path / "never")
    for address in (secured.sidecar, secured.coordinator):
        for files in (None, stranger, pretender):
            with (
                StatusClient(address, **(files.settings if files else {})) as client,
                pytest.raises(UnavailableError, match=address),
            ):
                client.list_saves(status_pb2.ListSavesRequest())
        with (
            grpc.secure_channel(
                address, grpc.ssl_channel_credentials(secured.client.ca.read_bytes())
            ) as anonymous,
            pytest.raises(grpc.RpcError, match="UNAVAILABLE"),
        ):
            status_pb2_grpc.StatusStub(anonymous).ListSaves(
                status_pb2.ListSavesRequest(), timeout=BOUND_S
            )
    assert not (tmp_path / "never").exists()
    # They have done no harm.
    secured.save(secured.client, tmp_path / "after")


def test_bad_files_are_errors_at_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    address = f"unix://{tmp_path}/d.sock"
    sidecar = ("sidecar", "--address", address, "--coordinator", "127.0.0.1:7")
    result = pannier(
        *sidecar,
        *("--spool", str(tmp_path / "spool"), "--listen", "127.0.0.1:7071"),
        *Files(one.cert, two.key, one.ca).flags,
    )
    assert result.code == 2, result
    assert "is not the key of the certificate" in result.err
    settings = load_settings(sidecar="127.0.0.1:7", **{**one.settings, "tls_ca": "/missing"})
    with pytest.raises(ConfigurationError, match=r"PANNIER_TLS_CA=.*missing"):
        Client(settings).save({"w": torch.zeros(1)}, checkpoint_id=str(tmp_path / "s"))


def test_a_listener_for_other_hosts_is_refused_without_tls(tmp_path: Path) -> None:
    result = pannier(
        "coordinator", "--address", f"unix://{tmp_path}/d.sock", "--listen", "0.0.0.0:7070"
    )
    assert result.code == 2, result
    assert "--insecure-listen" in result.err


# Unix sockets.


@needs_root
def test_another_user_is_refused_by_both_daemons(daemons: Daemons) -> None:
    sockets = [
        Path(address.removeprefix("unix://"))
        for address in (daemons.sidecar_address, daemons.coordinator_address)
    ]
    # The one that passes the spool's descriptors.
    sockets.append(sockets[0].with_name(f"{sockets[0].name}.fd"))
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert may_connect(path, user=0)
        assert not may_connect(path)


def test_a_socket_in_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    address = ("--address", f"unix://{tmp_path}/d.sock")
    spool = ("--spool", str(tmp_path / "spool"), "--coordinator", "127.0.0.1:7")
    for daemon in (("coordinator",), ("sidecar", *spool)):
        result = pannier(*daemon, *address)
        assert result.code == 2, result
        assert f"other users may enter {tmp_path} (mode 755)" in result.err
        assert "chmod 700" in result.err
