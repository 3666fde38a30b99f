"""Types of options (sizes, durations, addresses) and options that commands share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    _Type = click.ParamType[Any]
else:
    # Not generic in older versions of click.
    _Type = click.ParamType

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Size(_Type):
    """Bytes: ``201326592``, ``192MiB``, ``1.5 GiB``, ``2GB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes as an int."""
        if isinstance(value, int):
            return value
        from pannier.common.units import parse_size

        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Seconds(_Type):
    """A duration in seconds, without a unit; positive, or also 0 with ``zero``."""

    name = "seconds"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds as a float."""
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if not (0 < seconds < float("inf") or (self._zero and seconds == 0)):
            what = "a number of seconds from 0" if self._zero else "a positive number of seconds"
            self.fail(f"{value!r} is not {what}", param, ctx)
        return seconds


class Duration(_Type):
    """Seconds, given with a unit: ``90s``, ``30min``, ``6h``, ``2d12h``."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds as a float."""
        from pannier.common.units import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Address(_Type):
    """``unix:///path`` or ``host:port``."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address, checked."""
        from pannier.wire.addresses import parse_address
        from pannier.wire.errors import ConfigurationError

        setting = param.opts[0] if param is not None and param.opts else "address"
        try:
            return parse_address(value, setting=setting)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), ctx, param) from error


class HttpAddress(_Type):
    """``host:port``, or a port on loopback."""

    name = "web-address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as ``host:port``, checked."""
        from pannier.daemon.http_server import http_address
        from pannier.wire.errors import ConfigurationError

        setting = param.opts[0] if param is not None and param.opts else "address"
        try:
            return http_address(value, setting=setting)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), ctx, param) from error


class JsonObject(_Type):
    """A JSON object on one line."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """The object as a dict."""
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            # Numbers that are too long and brackets that are too deep raise no JSONDecodeError.
            self.fail(f"not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return parsed


class Location(_Type):
    """A directory in storage: a URL, or a path, which is made absolute."""

    name = "location"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The URL or absolute path."""
        from pannier.common.locations import absolute
        from pannier.wire.errors import InvalidRequestError

        try:
            return absolute(value)
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)


class CheckpointPattern(_Type):
    """A :class:`~pannier.common.locations.Pattern`."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The pattern."""
        from pannier.common.locations import Pattern
        from pannier.wire.errors import InvalidRequestError

        try:
            return value if isinstance(value, Pattern) else Pattern(value)
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)


def option(flag: str, *declarations: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """``click.option`` that also reads ``PANNIER_<FLAG>`` and shows it in the help."""
    variable = "PANNIER_" + flag.removeprefix("--").replace("-", "_").upper()
    attributes.setdefault("envvar", variable)
    attributes.setdefault("show_envvar", True)
    return click.option(flag, *declarations, **attributes)


def combined(*parts: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """One decorator that adds ``parts`` in this order."""

    def decorate(command: _Command) -> _Command:
        for part in reversed(parts):
            command = part(command)
        return command

    return decorate


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, of the form described above."
)

output_options = combined(
    click.option(
        "-o",
        "--output",
        "wide",
        type=click.Choice(["wide"]),
        callback=lambda ctx, param, value: value is not None,
        help="Show all columns, and lines of any length, as a pipe gets them.",
    ),
    json_option,
)
"""For commands that print a table: :class:`pannier.cli.table.Table`."""

log_format_option = option(
    "--log-format",
    # Literals, so that this module imports nothing of pannier.daemon.
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Text, or one JSON object per line with timestamp, level, logger, message, daemon and host; about "
    "a save also job, save, checkpoint, attempt and rank.",
)

storage_options = option(
    "--storage-options",
    type=JsonObject(),
    default="{}",
    metavar="JSON",
    help='Arguments of the fsspec file system, like \'{"endpoint_url": "http://localhost:4443"}\'. '
    "Credentials usually come from the environment instead.",
)

retention_options = combined(
    option(
        "--keep-newest",
        type=click.IntRange(1),
        metavar="N",
        help="Keep the checkpoints of the job's N newest steps in the same directory.",
    ),
    option(
        "--keep-every",
        type=click.IntRange(1),
        metavar="K",
        help="Keep those whose step, the last number in the name (of what the pattern's wildcards match), is a "
        "multiple of K.",
    ),
    option(
        "--keep-best",
        multiple=True,
        metavar="METRIC:min|max[:N]",
        help="Keep the N best (1) by a metric of async_save(metrics=...); may be given several times "
        "(separated by spaces in the variable).",
    ),
    option(
        "--keep",
        multiple=True,
        metavar="NAME",
        help="Always keep those of this name, or in a directory of this name, which may have shell "
        "wildcards; may be given several times (separated by spaces in the variable).",
    ),
)
"""Arguments of :func:`policy_of`, with :func:`retention_pattern`."""


def retention_pattern(flag: str) -> Callable[[_Command], _Command]:
    """The option for the directories below a root that the retention rules apply to."""
    return option(
        flag,
        "pattern",
        type=CheckpointPattern(),
        default="*",
        show_default=True,
        metavar="PATTERN",
        envvar="PANNIER_RETENTION_PATTERN",
        help="Which directories below a root are checkpoints that the rules are about: their names below it, "
        "with shell wildcards, like checkpoint-*/dcp.",
    )


def policy_of(settings: dict[str, Any]) -> Any:
    """Removes the values of :data:`retention_options` from ``settings``; returns a retention Policy."""
    from pannier.maintenance.retention_policy import Best, Policy

    return Policy(
        newest=settings.pop("keep_newest"),
        every=settings.pop("keep_every"),
        best=tuple(map(Best.parse, settings.pop("keep_best"))),
        always=settings.pop("keep"),
        pattern=settings.pop("pattern"),
    )


tls_options = combined(
    *(
        option(
            f"--tls-{name}",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=help,
        )
        for name, help in (
            ("cert", "For TCP: own certificate, PEM, presented to servers and clients."),
            ("key", "Its private key, PEM."),
            ("ca", "CAs that must have signed the peer's certificate, PEM."),
        )
    )
)

peers_option = option(
    "--peers",
    type=Address(),
    metavar="HOST:PORT",
    help="Serve blocks of checkpoints here to the sidecars of the job's other hosts, which connect to this "
    "very address; TLS is required except on loopback. Not with --jobs.  [default: not served]",
)

restore_budget_option = option(
    "--restore-budget",
    type=Size(),
    metavar="SIZE",
    help="Most memory for blocks that loads of this host's ranks read from peers and storage, those under "
    "way included; at least one block of 8 MiB, and one under way.  [default: 256MiB]",
)

upload_options = combined(
    option(
        "--upload-threads",
        type=click.IntRange(1, 64),
        metavar="NUMBER",
        help="Cores that uploads may use at a time, for TLS and checksums above all. With --jobs, of each job.  "
        "[default: a quarter of the host's, at least 1 and at most 8]",
    ),
    option(
        "--upload-limit",
        type=Size(),
        metavar="SIZE",
        help="Most bytes per second of all uploads together, so that the network stays free for training; "
        "`pannier status` shows when it is what limits. With --jobs, of each job.  [default: no limit]",
    ),
)
"""Options of sidecars, and of `pannier up` for its sidecar."""

replicas_options = combined(
    option(
        "--replicas",
        type=click.IntRange(0, 1),
        default=0,
        show_default=True,
        metavar="0|1",
        help="With 1, what this host's ranks save is also sent to the spool of another host, which uploads it if "
        "this one is lost before it has; and this host keeps another's. Needs --peers. Not with --jobs.",
    ),
    option(
        "--replicas-limit",
        type=Size(),
        default="256MiB",
        show_default=True,
        metavar="SIZE",
        help="Most bytes per second that are sent there; half of it while uploads are under way.",
    ),
    option(
        "--failure-domain",
        metavar="NAME",
        help="Rack, zone or other label: a replica goes to a host with another one.  [default: the host's "
        "name]",
    ),
)
"""Options of sidecars, and of `pannier up` for its sidecar."""

daemon_options = combined(
    option(
        "--listen",
        type=Address(),
        metavar="HOST:PORT",
        help="Also listen here; TLS is required except on loopback.",
    ),
    option(
        "--health",
        type=Address(),
        metavar="HOST:PORT",
        help="Serve gRPC health checks here, in plaintext, and nothing else: services liveness and "
        "readiness, for Kubernetes' probes.",
    ),
    option(
        "--metrics",
        type=HttpAddress(),
        metavar="[HOST:]PORT",
        help="Serve Prometheus metrics (/metrics) and a status page (/) here over HTTP, read-only and "
        "without TLS: anyone who can connect sees names of jobs, hosts and checkpoints. A port alone "
        "is on loopback.",
    ),
    log_format_option,
    tls_options,
    option(
        "--insecure-listen",
        is_flag=True,
        help="Listen on TCP without TLS, where anyone who can connect may save, abort and read "
        "checkpoints.",
    ),
    option(
        "--allow-uid",
        type=click.IntRange(0),
        multiple=True,
        metavar="UID",
        help="Users besides this one and root that may connect to the unix socket, by its access "
        "control list; may be given several times (separated by spaces in the variable).",
    ),
    option(
        "--allow",
        multiple=True,
        metavar="ROOT",
        help="Only accept checkpoints below this directory or URL; may be given several times "
        "(separated by spaces in the variable). Default: any.",
    ),
    storage_options,
    option("--host", help="Name of this host in status and errors.  [default: the hostname]"),
    option("--embedded", is_flag=True, hidden=True, help="Set by `pannier up`."),
)
