"""Mutual TLS on TCP connections: certificate files in, gRPC credentials out.

The same three files serve a daemon as server and as client; each side accepts only certificates that the
CA has signed. Replaced files are reloaded: a server checks before each handshake, a client calls
:meth:`Tls.changed` before it opens a channel again. Thread-safe.
"""

import inspect
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import grpc

from pannier.wire.addresses import ChannelOptions
from pannier.wire.errors import ConfigurationError

_log = logging.getLogger(__name__)

FLAGS: Final = ("--tls-cert", "--tls-key", "--tls-ca")
VARIABLES: Final = ("PANNIER_TLS_CERT", "PANNIER_TLS_KEY", "PANNIER_TLS_CA")
_EXPIRED: Final = 10
"""X509_V_ERR_CERT_HAS_EXPIRED."""
_LARGEST: Final = 1 << 20
"""Bytes of a file; a bundle of all public CAs has a quarter of this."""
_STEPS: Final = 16
"""More than the turns of a handshake in memory."""

Stamp = tuple[tuple[int, int, int], ...]
"""Changes when a file is replaced."""


@dataclass(frozen=True)
class _Pem:
    key: bytes
    cert: bytes
    ca: bytes


class Tls:
    """Three files in PEM form, checked by the constructor.

    Args:
        cert: own certificate, with the chain up to the CA, for servers and clients.
        key: its private key, without a passphrase.
        ca: certificates of the CAs that may have signed a peer's.
        settings: names of the three settings, for errors.

    Raises:
        ConfigurationError: a file is missing or unreadable, isn't PEM, the key isn't the
            certificate's, or the certificate has expired.
    """

    def __init__(self, cert: Path, key: Path, ca: Path, *, settings: Sequence[str] = FLAGS) -> None:
        self._paths = (cert, key, ca)
        self._settings = tuple(settings)
        self._stamp = self._seen = self._given = _stamp(self._paths)
        """Of the files in use, of those last checked, and of those of the last channel."""
        self._pem = self._read()

    def changed(self) -> bool:
        """Whether :meth:`channel_credentials` would return other credentials than the last time."""
        self._renew()
        return self._given != self._stamp

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client, from the files' current or last valid content."""
        self._renew()
        self._given, pem = self._stamp, self._pem
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that requires client certificates."""
        known = self._stamp

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls it in one of its threads before each handshake.
            nonlocal known
            self._renew()
            if self._stamp == known:
                return None
            known = self._stamp
            return _configuration(self._pem)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._pem),
            renewed,  # type: ignore[arg-type]  # None: unchanged
            require_client_authentication=True,
        )

    def _renew(self) -> None:
        stamp = _stamp(self._paths)
        if stamp == self._seen:
            return
        # Set before the read, so that a replacement meanwhile is noticed.
        self._seen = stamp
        try:
            self._pem = self._read()
        except ConfigurationError as error:
            # Perhaps only half replaced: the valid content stays in use.
            _log.warning(
                "the replaced TLS files are invalid, the previous ones stay in use: %s", error
            )
        else:
            self._stamp = stamp
            _log.info("the TLS files were replaced")

    def _read(self) -> _Pem:
        contents = []
        for setting, path in zip(self._settings, self._paths, strict=True):
            try:
                with path.open("rb") as file:
                    contents.append(file.read(_LARGEST))
            except OSError as error:
                raise ConfigurationError(
                    f"{setting}={path} can't be read: {error.strerror or error}"
                ) from error
        cert, key, ca = contents
        self._check()
        return _Pem(key=key, cert=cert, ca=ca)

    def _check(self) -> None:
        cert, key, ca = self._paths
        named_cert, named_key, named_ca = (
            f"{setting}={path}" for setting, path in zip(self._settings, self._paths, strict=True)
        )

        def no_passphrase() -> NoReturn:
            raise ConfigurationError(f"{named_key} has a passphrase: give a key without one")

        # Only for the check: gRPC's own errors come late and name no file.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(cert, key, no_passphrase)
        except ConfigurationError:
            raise
        except (ssl.SSLError, OSError, ValueError) as error:
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                raise ConfigurationError(
                    f"{named_key} is not the key of the certificate in {named_cert}"
                ) from error
            raise ConfigurationError(
                f"{named_cert} with {named_key} is no certificate with its key in PEM form: {error}"
            ) from error
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"{named_ca} holds no CA certificates in PEM form: {error}"
            ) from error
        _check_time(context, cert, named_cert)


def tls_of(
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    *,
    settings: Sequence[str] = FLAGS,
) -> Tls | None:
    """TLS with these files, None without any.

    Raises ConfigurationError when some are missing, or as :class:`Tls`.
    """
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        missing = [
            name for name, path in zip(settings, (cert, key, ca), strict=True) if path is None
        ]
        raise ConfigurationError(
            f"TLS needs {', '.join(settings)} together; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set"
        )
    return Tls(cert, key, ca, settings=settings)


def is_unix(address: str) -> bool:
    """Whether ``address`` is a unix socket, which the file system protects."""
    return address.startswith("unix:")


def open_channel(address: str, options: ChannelOptions, tls: Tls | None) -> grpc.Channel:
    """A channel to ``address``, over TCP with ``tls`` unless that is None."""
    credentials = None if tls is None or is_unix(address) else tls.channel_credentials()
    return channel_to(address, options, credentials)


def channel_to(
    address: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
) -> grpc.Channel:
    """A channel of gRPC's own, in plaintext without ``credentials``.

    Instrumentations replace gRPC's functions by wrappers, whose calls may not be cancelled:
    opentelemetry-instrumentation-grpc 0.66b2 returns a generator for a stream of responses
    (https://github.com/open-telemetry/opentelemetry-python-contrib/blob/v0.66b2/instrumentation/opentelemetry-instrumentation-grpc/src/opentelemetry/instrumentation/grpc/_client.py).
    """
    channel: grpc.Channel
    if credentials is None:
        channel = inspect.unwrap(grpc.insecure_channel)(address, options=options)
    else:
        channel = inspect.unwrap(grpc.secure_channel)(address, credentials, options=options)
    return channel


def open_aio_channel(address: str, options: ChannelOptions, tls: Tls | None) -> grpc.aio.Channel:
    """As :func:`open_channel`, for an event loop."""
    if tls is None or is_unix(address):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def _stamp(paths: Sequence[Path]) -> Stamp:
    # Follows links, by which Kubernetes replaces a Secret's files.
    return tuple(_file_stamp(path) for path in paths)


def _file_stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0  # Reading it raises the reason.
    return found.st_ino, found.st_mtime_ns, found.st_size


def _check_time(server: ssl.SSLContext, cert: Path, name: str) -> None:
    """Raises ConfigurationError when the certificate has expired.

    By a handshake in memory: the standard library has no other access to its dates.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # Its own trust anchor here: its peers check who signed it.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for step in range(_STEPS):
        try:
            ends[step % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code == _EXPIRED:
                raise ConfigurationError(f"the certificate in {name} has expired") from error
            # Its peers report any other problem.
            _log.debug("%s: %s", name, error.verify_message)
            return
        except ssl.SSLError as error:
            _log.debug("the dates of %s can't be read: %s", name, error)
            return
        if step % 2 == 0:
            return
