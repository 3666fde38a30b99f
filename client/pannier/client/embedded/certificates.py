"""TLS certificates for the daemons of one job on several hosts.

In: the coordinator's host. Out: PEM texts: a certificate for the coordinator and its host's sidecar, and
one for the other sidecars, signed by a CA whose key is dropped at once, so that no further certificate can
be issued. Both contain one name that peers verify instead of each other's addresses.
"""

import datetime
import ipaddress
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc

from pannier.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

PEER_NAME: Final = "sidecar.pannier.invalid"
"""The name that sidecars verify in each other's certificates."""
_VALID: Final = datetime.timedelta(days=366)
"""Longer than any job runs; the keys are removed with their daemons."""
_SKEW: Final = datetime.timedelta(days=1)
"""Largest difference between the clocks of two hosts."""


@dataclass(frozen=True, repr=False)
class TlsBundle:
    """Certificate, key and CA of one end, as PEM texts. Without ``repr``: it holds a private key."""

    cert: str
    key: str
    ca: str

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client."""
        return grpc.ssl_channel_credentials(self.ca.encode(), self.key.encode(), self.cert.encode())


def issue(host: str) -> tuple[TlsBundle, TlsBundle]:
    """The bundles of the coordinator at ``host``, a name or an address, and of its callers.

    Raises:
        ConfigurationError: ``cryptography`` isn't installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a job on several hosts needs certificates, and {error.name} is not installed: "
            "pip install cryptography there, or set PANNIER_COORDINATOR to a `pannier coordinator`"
        ) from error

    # So that the CAs of different jobs have different names.
    job_id = secrets.token_hex(8)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"pannier {job_id}")
    ca = (
        _builder(issuer, issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA256())
    )

    # Sidecars call the coordinator, and each other.
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    peer = x509.DNSName(PEER_NAME)

    def leaf(role: str, *names: "x509.GeneralName") -> TlsBundle:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(f"pannier {job_id} {role}"), issuer, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
                critical=False,
            )
            .sign(authority, hashes.SHA256())
        )
        return TlsBundle(cert=_pem(certificate), key=_pem_key(key), ca=_pem(ca))

    return (
        leaf("coordinator", _general_name(host), peer),
        leaf("sidecar", peer),
    )


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePrivateKey"
) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: "x509.Certificate") -> str:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: "ec.EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
