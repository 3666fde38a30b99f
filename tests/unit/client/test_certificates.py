"""Certificates of a job on several hosts, with real connections: only their holders are let in."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pannier.client.embedded.certificates import PEER_NAME, TlsBundle, issue
from pannier.client.embedded.network import probe_daemon
from pannier.common import timeouts
from pannier.daemon.listeners import bind_listeners, server_options
from pannier.wire.tls import Tls
from support.network.certificates import write_tls
from support.processes.ranks import free_port

SOON_S = 3.0


def tls(papers: TlsBundle, directory: Path) -> Tls:
    directory.mkdir()
    return Tls(*write_tls(papers, directory))


class SlowHealth(health.HealthServicer):
    def Check(self, request: Any, context: Any) -> Any:
        time.sleep(0.5)
        return super().Check(request, context)


@contextmanager
def serving(papers: Tls, health_servicer: Any = health.HealthServicer) -> Iterator[str]:
    """A daemon's server that shows these papers; its address."""
    server = grpc.server(ThreadPoolExecutor(2), options=server_options())
    servicer = health_servicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{free_port()}"
    with bind_listeners(server, address, tls=papers):
        server.start()
        try:
            yield address
        finally:
            server.stop(0).wait()


def test_only_who_holds_the_jobs_papers_can_call(tmp_path: Path) -> None:
    server, caller = issue("127.0.0.1")
    _, stranger = issue("127.0.0.1")
    with serving(tls(server, tmp_path / "server")) as address:
        assert probe_daemon(address, caller.channel_credentials(), SOON_S) == ""
        # Another job's are signed by another CA.
        other = stranger.channel_credentials()
        assert "isn't signed by a CA" in probe_daemon(address, other, SOON_S)
        # Who knows the CA, which is no secret, still needs a certificate of its own.
        mixed = TlsBundle(cert=stranger.cert, key=stranger.key, ca=caller.ca)
        assert "can't be reached" in probe_daemon(address, mixed.channel_credentials(), SOON_S)
        for credentials in (None, grpc.ssl_channel_credentials(caller.ca.encode())):
            with (
                grpc.insecure_channel(address)
                if credentials is None
                else grpc.secure_channel(address, credentials)
            ) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_callers_papers_are_no_coordinators(tmp_path: Path) -> None:
    server, caller = issue("127.0.0.1")
    callers = caller.channel_credentials()
    # One host of the job can't pass for the coordinator of the others.
    with serving(tls(caller, tmp_path / "caller")) as address:
        assert "for another host name" in probe_daemon(address, callers, SOON_S)
    with serving(tls(server, tmp_path / "server")) as address:
        assert probe_daemon(address, callers, SOON_S) == ""


def test_all_sidecars_of_a_job_are_believed_by_the_name_that_they_share(tmp_path: Path) -> None:
    server, caller = issue("10.0.0.1")
    _, stranger = issue("10.0.0.1")
    known = [tls(each, tmp_path / str(n)) for n, each in enumerate((server, caller, stranger))]
    by_name = [("grpc.ssl_target_name_override", PEER_NAME)]
    for own in known[:2]:
        with serving(own) as address:
            for other in known:
                credentials = other.channel_credentials()
                with grpc.secure_channel(address, credentials, options=by_name) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    request = health_pb2.HealthCheckRequest()
                    if other is not known[2]:
                        stub.Check(request, timeout=SOON_S)
                        continue
                    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                        stub.Check(request, timeout=SOON_S)


def test_the_coordinator_is_believed_under_its_own_address_only(tmp_path: Path) -> None:
    server, caller = issue("10.0.0.1")
    with serving(tls(server, tmp_path / "server")) as address:
        why = probe_daemon(address, caller.channel_credentials(), SOON_S)
        assert "for another host name" in why


def test_a_coordinator_on_a_busy_host_is_slow_but_not_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, caller = issue("127.0.0.1")
    monkeypatch.setattr(timeouts, "COORDINATOR_REACH_S", 0.2)
    with serving(tls(server, tmp_path / "server"), SlowHealth) as address:
        callers = caller.channel_credentials()
        assert probe_daemon(address, callers, timeouts.COORDINATOR_START_S) == ""
        assert "did not answer within the deadline" in probe_daemon(address, callers, 0.3)


@pytest.mark.parametrize("host", ["localhost", "node-0.cluster", "::1", "127.0.0.1"])
def test_names_and_numbers_are_both_good(host: str) -> None:
    from cryptography import x509

    server, _ = issue(host)
    names = x509.load_pem_x509_certificate(server.cert.encode()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each.value) for each in found] == [host, PEER_NAME]


def test_keys_are_for_one_user_and_not_in_any_text(tmp_path: Path) -> None:
    server, caller = issue("127.0.0.1")
    for papers in (server, caller):
        for path in write_tls(papers, tmp_path):
            assert path.stat().st_mode & 0o777 == 0o600
        assert "PRIVATE" in papers.key
        assert "PRIVATE" not in f"{papers} {papers!r}"
    assert len({server.key, caller.key}) == 2
