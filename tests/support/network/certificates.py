"""Certificates for tests: a CA, and what it signs, as PEM files."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pannier.client.embedded.certificates import TlsBundle
from pannier.client.embedded.daemon_spec import DaemonSpec, tls_files, tls_texts, write_files

_HOUR = datetime.timedelta(hours=1)


class Files:
    """One party's three files."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self.cert = cert
        self.key = key
        self.ca = ca

    @property
    def flags(self) -> list[str]:
        """Of the command line."""
        return [
            *("--tls-cert", str(self.cert)),
            *("--tls-key", str(self.key)),
            *("--tls-ca", str(self.ca)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PANNIER_TLS_CERT": str(self.cert),
            "PANNIER_TLS_KEY": str(self.key),
            "PANNIER_TLS_CA": str(self.ca),
        }

    @property
    def settings(self) -> dict[str, Path]:
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    key_cert_sign=True,
    crl_sign=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A CA whose files lie in ``directory``."""

    def __init__(self, directory: Path, name: str = "test CA") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + _HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            # Python 3.13 wants these two, and who signed a certificate.
            .add_extension(_SIGNS, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / "ca.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        valid_s: float = 3600,
        passphrase: bytes | None = None,
    ) -> Files:
        """A certificate for ``host``, a name or a number, good as a server's and as a client's.

        The same name again replaces the files. A negative ``valid_s``: it has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + datetime.timedelta(seconds=valid_s))
            .add_extension(
                x509.SubjectAlternativeName([_called(host)]),
                critical=False,
            )
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        cert, private = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        _replace(cert, certificate.public_bytes(serialization.Encoding.PEM))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            encryption = serialization.BestAvailableEncryption(passphrase)
        _replace(
            private,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            ),
        )
        return Files(cert, private, self.file)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)


def _called(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def write_tls(tls: TlsBundle, directory: Path) -> tuple[Path, Path, Path]:
    """Writes them as a client does for its embedded daemons; the certificate, the key and the CA."""
    write_files(DaemonSpec(directory, None, flags=("--discard",), files=tls_texts(tls)))
    return tls_files(directory)
