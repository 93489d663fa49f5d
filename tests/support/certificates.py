"""Certificates made on the spot: authorities, members, clients."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """Paths of PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs what it is asked to."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}-ca.pem"
        builder = self._builder(self._name, self._key.public_key(), days=1)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, hosts: tuple[str, ...] = ("localhost",), days: float = 1) -> Issued:
        """For 127.0.0.1 and `hosts`, names or addresses. Negative `days`: one that has expired. The files are
        replaced by renaming, as whoever re-issues certificates does."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), days)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_name_of(host) for host in (*hosts, "127.0.0.1")]), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        issued = Issued(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        contents = ((issued.key, private), (issued.cert, certificate.public_bytes(serialization.Encoding.PEM)))
        for path, content in contents:
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.rename(path)
        return issued

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + days * DAY)
        )


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
