"""Make the certificate with which SeaweedFS's parts authenticate each other.

python demo/certificates.py FOLDER     makes FOLDER/cert.pem and FOLDER/key.pem if missing
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_YEARS_S = 20 * 365 * 24 * 3600


def ensure_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key, which only this user can read."""
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    if not cert_path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        _write(
            key_path,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        cert = _signed(key)
        _write(cert_path, cert.public_bytes(serialization.Encoding.PEM))
    return cert_path, key_path


def _signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lorikeet")])
    now = dt.datetime.now(dt.UTC)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(seconds=_YEARS_S))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(key, hashes.SHA256())
    )


def _write(path: Path, data: bytes) -> None:
    """Write the file atomically."""
    staging = path.with_suffix(".tmp")
    staging.unlink(missing_ok=True)
    with os.fdopen(os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data)
    staging.rename(path)


if __name__ == "__main__":
    ensure_certificate(Path(sys.argv[1]))
