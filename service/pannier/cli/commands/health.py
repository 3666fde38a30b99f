"""``pannier health``: one health check, its result as an exit status. For probes that run a command."""

import os
from pathlib import Path
from typing import Any

import click

from pannier.cli.errors import NEGATIVE
from pannier.cli.options import Address, Seconds, tls_options
from pannier.cli.status_client import embedded_sidecars, translate_rpc_errors
from pannier.common import timeouts


@click.command("health")
@click.option(
    "--address",
    # The settings of this container's daemon, and then of its clients.
    envvar=["PANNIER_HEALTH", "PANNIER_ADDRESS", "PANNIER_SIDECAR"],
    type=Address(),
    show_envvar=True,
    help="The daemon to ask, a sidecar or the coordinator: unix:///path or host:port.  "
    "[default: this user's embedded sidecar]",
)
@tls_options
@click.option(
    "--service",
    default="",
    metavar="NAME",
    help="A service of the daemon, like pannier.v1.Sidecar; at the address of --health: liveness "
    "or readiness.  [default: the daemon as a whole]",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=timeouts.STATUS_CALL_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for the response.",
)
def command(*, address: str | None, service: str, timeout: float, **tls: Path | None) -> None:
    """Check whether a daemon lives and takes saves.

    Exit status 0: it does; 1: it is draining, or, at the address of --health,
    recovering its spool; 3: it doesn't respond, as at other addresses while it recovers.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pannier.wire import addresses, errors
    from pannier.wire.tls import open_channel, tls_of

    address = address or embedded_sidecars()[0]
    # The listener of --health is in plaintext, also where TLS is configured.
    plain = address == os.environ.get("PANNIER_HEALTH")
    secured = None if plain else tls_of(tls["tls_cert"], tls["tls_key"], tls["tls_ca"])
    with open_channel(address, addresses.channel_options(), secured) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with translate_rpc_errors(address):
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise errors.ConfigurationError(
                        f"--service {service!r} is not a service of the daemon at {address}"
                    ) from error
                raise
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    click.echo(status.lower())
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        click.get_current_context().exit(NEGATIVE)
