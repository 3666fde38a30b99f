"""The client's settings.

In: environment variables and overrides. Out: one validated, immutable record. Read once, when the
client is first used.
"""

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pannier.common.daemon_process import serving_sidecars
from pannier.wire import addresses, limits, object_names
from pannier.wire.auth_token import VARIABLE, TokenFile
from pannier.wire.errors import ConfigurationError, InvalidRequestError
from pannier.wire.tls import VARIABLES, Tls, is_unix, tls_of
from pannier.wire.variables import misspelt

_log = logging.getLogger(__name__)

_PREFIX = "PANNIER_"
_LONGEST_SAVE_S = 7 * 86400


class Settings(BaseSettings):
    """Settings of a client: ``PANNIER_<NAME>`` in the environment, or an override.

    Make one with :func:`load_settings`, whose errors name the variable.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid"
    )

    sidecar: str | None = None
    """Address of the host's sidecar, ``unix:///path`` or ``host:port``. None: the embedded one."""
    coordinator: str | None = None
    """Address of the job's coordinator: an embedded sidecar is started with it, a configured
    one must be connected to it. None: the embedded one, or that of the configured sidecar."""
    job: str | None = None
    """Name of the job. None: a unique one."""
    listen: str | None = None
    """Where the embedded coordinator of a job on several hosts listens, ``host:port``; the other
    hosts connect to the same address. None: an address of rank 0's host and a free port."""
    spool: Path | None = None
    """Directory of the embedded sidecar's spool."""
    transport: str = "auto"
    """How bytes reach the sidecar: ``mapped`` (staged into files of its spool), ``streamed``, or
    ``auto``: mapped where that is possible."""
    runtime_dir: Path = Field(default_factory=addresses.runtime_dir)
    """Where the embedded daemons keep their sockets and their log."""
    plan_timeout: float = Field(default=300.0, gt=0, le=86400)
    """Seconds a save waits for the plans of the other ranks."""
    save_timeout: float = Field(default=3600.0, gt=0, le=_LONGEST_SAVE_S)
    """Seconds until a save must be committed."""
    tls_cert: Path | None = None
    """Own certificate, PEM, for a sidecar on TCP. None: plaintext."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    tls_ca: Path | None = None
    """CAs that must have signed the sidecar's certificate, PEM."""
    allow_uid: str = ""
    """Users besides this one and root whose sidecar is trusted on a unix socket, as numbers with
    spaces between."""
    token_file: Path | None = None
    """File with the job's token, where a node serves several jobs. None: no token."""
    check_replicas: bool = False
    """Whether tensors that several ranks hold are compared when a save is planned, as objects
    are: a warning names those whose values differ by rank."""
    max_in_flight: int = Field(default=2, ge=1, le=16)
    """Saves that may be staged but not yet ingested; each holds one arena."""

    @property
    def embedded(self) -> bool:
        """Whether the client finds or starts its own daemons."""
        return self.sidecar is None

    def sidecars(self) -> list[str]:
        """Addresses of this host's sidecars: the configured one, or the embedded ones that accept connections."""
        return serving_sidecars(self.runtime_dir) if self.sidecar is None else [self.sidecar]

    @property
    def trusted_uids(self) -> frozenset[int]:
        """Users whose sidecar is trusted on a unix socket."""
        return frozenset((os.geteuid(), 0, *(int(word) for word in self.allow_uid.split())))

    def tls(self) -> Tls | None:
        """TLS for a sidecar on TCP; None: plaintext. Raises ConfigurationError."""
        return tls_of(self.tls_cert, self.tls_key, self.tls_ca, settings=VARIABLES)

    def token(self) -> TokenFile | None:
        """The job's token; None: not set. Raises ConfigurationError for a sidecar on TCP."""
        if self.token_file is None or self.sidecar is None:
            return None
        if not is_unix(self.sidecar):
            raise ConfigurationError(
                f"{VARIABLE}={self.token_file} is for a sidecar on a unix socket, and PANNIER_SIDECAR is "
                f"{self.sidecar}: a sidecar on TCP knows its clients by their certificates"
            )
        return TokenFile(self.token_file)

    @field_validator("allow_uid")
    @classmethod
    def _uids(cls, value: str) -> str:
        for word in value.split():
            if not (word.isascii() and word.isdigit() and len(word) <= 10):
                raise ValueError("use numbers of users, with spaces between")
        return value

    @field_validator("sidecar", "coordinator")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else addresses.parse_address(value, setting="address")

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str | None) -> str | None:
        if value is not None:
            parsed = addresses.parse_address(value, setting="address")
            if parsed.startswith("unix:") or addresses.is_wildcard(parsed):
                raise ValueError("use host:port, as the other hosts reach it")
        return value

    @field_validator("job")
    @classmethod
    def _job(cls, value: str | None) -> str | None:
        if value is not None:
            object_names.check_job(value)
        return value

    @field_validator("transport")
    @classmethod
    def _transport(cls, value: str) -> str:
        if value not in ("auto", "mapped", "streamed"):
            raise ValueError("use auto, mapped or streamed")
        return value

    @field_validator("spool", "runtime_dir", "tls_cert", "tls_key", "tls_ca", "token_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("use an absolute path: the daemons run in another directory")
        return value

    @field_validator("runtime_dir")
    @classmethod
    def _short(cls, value: Path) -> Path:
        for address in (addresses.embedded_sidecar, addresses.embedded_coordinator):
            addresses.parse_address(address(value), setting="its socket")
        return value


def check_timeout(timeout: float) -> float:
    """``timeout`` as a float, in seconds.

    Raises InvalidRequestError unless it is above 0 and at most 7 days.
    """
    try:
        is_valid = 0 < timeout <= _LONGEST_SAVE_S  # nan is neither
    except (TypeError, ValueError):  # no number, or an array of several
        is_valid = False
    if not is_valid:
        raise InvalidRequestError(
            f"timeout={timeout!r}: give seconds above 0 and at most {_LONGEST_SAVE_S} (7 days), or None"
        )
    return float(timeout)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics as floats, by name; a NaN has no meaning and is left out.

    Raises InvalidRequestError naming the metric.
    """
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"metrics[{name!r}] is {value!r}, no number: {error}"
            ) from error
    limits.check_metrics(found)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, with ``overrides`` by field name on top.

    Raises:
        ConfigurationError: naming the variable (or the override) and its value.
    """
    if os.environ.get("RANK", "0") == "0":
        for text in misspelt(os.environ):
            _log.warning("%s", text)
    unknown = sorted(set(overrides) - set(Settings.model_fields))
    if unknown:
        raise ConfigurationError(
            f"there is no setting {unknown[0]!r}; settings are {', '.join(Settings.model_fields)}"
        )
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise ConfigurationError(
            "; ".join(
                _explain(str(e["loc"][0]), e["input"], e["msg"], overrides) for e in error.errors()
            )
        ) from error


def _explain(name: str, value: object, message: str, overrides: dict[str, Any]) -> str:
    where = name if name in overrides else _PREFIX + name.upper()
    return f"{where}={str(value)!r}: {message.removeprefix('Value error, ')}"
