"""Settings of a sidecar: a wrong one is named."""

from pathlib import Path

import pytest

from pannier.sidecar.config import SidecarConfig
from pannier.wire import errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "nonsense"}, "--address"),
        ({"coordinator": "host:99999"}, "--coordinator"),
        ({"listen": "unix://relative"}, "--listen"),
        ({"memory": 1000}, "--memory 1000 is too little"),
        ({"restore_budget": (8 << 20) - 1}, r"--restore-budget 8388607 .* at least 8 MiB"),
        ({"peers": "node-1"}, "--peers='node-1' is neither"),
        ({"peers": "unix:///run/peers.sock"}, r"--peers=unix:.* is not host:port"),
        ({"peers": "0.0.0.0:7073"}, r"--peers=0\.0\.0\.0:7073 is no address that"),
        ({"peers": "[::]:7073"}, r"--peers=\[::\]:7073 is no address that"),
        ({"peers": "10.0.0.7:7073"}, r"--peers=10\.0\.0\.7:7073 can be reached .*--tls-cert"),
        ({"peers": "127.0.0.1:7073", "jobs": Path("/jobs")}, "--peers doesn't go with --jobs"),
        ({"replicas": 2}, "--replicas 2 is neither 0 nor 1"),
        ({"replicas": 1}, "--replicas 1 needs --peers"),
        ({"replicas": 1, "jobs": Path("/jobs")}, "--replicas doesn't go with --jobs"),
        ({"replicas_limit": 1000}, r"--replicas-limit 1000 .* at least 1 MiB per second"),
        ({"upload_threads": 65}, "--upload-threads 65 is not from 1 to 64"),
        ({"upload_threads": -1}, "--upload-threads -1 is not from 1 to 64"),
        ({"upload_limit": 1000}, r"--upload-limit 1000 .* at least 1 MiB per second"),
        ({"failure_domain": "rack\n1"}, "--failure-domain: .* printable"),
        ({"spool_budget": 0}, "--spool-budget"),
        ({"grace_s": 0.0}, "--grace"),
        ({"idle_exit_s": -1.0}, "--idle-exit"),
        ({"host": ""}, "--host"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"coordinator": "host:1", "spool": Path("/spool"), **settings}
    with pytest.raises(errors.ConfigurationError, match=message):
        SidecarConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("127.0.0.1:7073", "127.0.0.1:7073"),
        # As Kubernetes puts a pod's address between brackets.
        ("[127.0.0.1]:7073", "127.0.0.1:7073"),
        ("[::1]:7073", "[::1]:7073"),
    ],
)
def test_peers_may_have_an_address_of_either_kind_in_brackets(given: str, used: str) -> None:
    config = SidecarConfig(coordinator="host:1", spool=Path("/spool"), peers=given)
    assert config.peers == used


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (31, 7), (32, 8), (192, 8)]
)
def test_uploads_use_a_quarter_of_the_cores_by_default(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    config = SidecarConfig(coordinator="host:1", spool=Path("/spool"))
    assert (config.upload_threads, config.upload_limit) == (threads, None)


@pytest.mark.parametrize(("given", "used"), [("", "node-0"), ("rack-7", "rack-7")])
def test_without_a_label_each_host_is_a_failure_domain(given: str, used: str) -> None:
    config = SidecarConfig(
        coordinator="host:1", spool=Path("/spool"), host="node-0", failure_domain=given
    )
    assert config.failure_domain == used
