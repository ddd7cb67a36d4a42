"""Check mail, disks and settings."""

from __future__ import annotations

import shutil
import smtplib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from controlplane.maintenance.doctor.examination import LIMIT_S, Finding, failure, ok, warning

_LITTLE_BYTES, _TOO_LITTLE_BYTES = 2 << 30, 200 << 20
_LOCAL = {"localhost", "127.0.0.1", "::1"}


def mail(send_to: str | None = None) -> Iterator[Finding]:
    """Check that mail can be sent: connect and authenticate; send one only to `send_to`."""
    backend = settings.EMAIL_BACKEND.rsplit(".", 2)[-2]
    if backend == "console":
        yield warning(
            "mail goes to the web process's log: readers of the log can open its links",
            "set EMAIL_URL, for instance smtp+tls://user:password@host:587",
        )
        return
    place = f"{settings.EMAIL_HOST}:{settings.EMAIL_PORT}"
    if backend == "mail_files":
        place = getattr(settings, "EMAIL_FILE_PATH", "")
        if send_to is None:  # opening this backend makes a file
            if _can_write(Path(place)):
                yield ok(f"mail is written to {place}")
            else:
                yield failure(f"{place} cannot be written", "correct EMAIL_URL, or its owner")
            return
    try:
        server = get_connection(timeout=LIMIT_S - 0.5) if backend == "smtp" else get_connection()
        server.open()
        if send_to is not None:
            EmailMessage(
                "A mail from Lorikeet's doctor",
                f"Mail of {settings.BASE_URL} arrives.",
                to=[send_to],
                connection=server,
            ).send()
        server.close()
    except smtplib.SMTPAuthenticationError as error:
        yield failure(f"{place} refuses the user or password: {error}", "correct EMAIL_URL")
    except (smtplib.SMTPException, OSError) as error:
        yield failure(f"{place} cannot be used: {error}", "correct EMAIL_URL: host, port and TLS")
    else:
        yield ok(f"{place} takes mail" + (f"; sent one to {send_to}" if send_to else ""))


def _can_write(folder: Path) -> bool:
    """Return whether a file can be made in the folder, which may not exist yet."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def disks() -> Iterator[Finding]:
    """Check the free bytes where this machine's processes write."""
    folders = {"LORIKEET_WORK_DIR": settings.WORK_DIR, "temporary files": Path("/tmp")}
    for name, folder in folders.items():
        place = _existing(folder)
        free = shutil.disk_usage(place).free
        said = f"{name}: {free / 2**30:.1f} GiB free in {place}"
        if free < _TOO_LITTLE_BYTES:
            yield failure(said, "free some space: adapters are checked and trained here")
        elif free < _LITTLE_BYTES and name == "LORIKEET_WORK_DIR":
            yield warning(said, "free some space: a dataset or adapter can have gigabytes")
        else:
            yield ok(said)


def addresses() -> Iterator[Finding]:
    """Check that clients use https, and that nobody is trusted too much."""
    base, public = urlsplit(settings.BASE_URL), urlsplit(settings.S3_PUBLIC_ENDPOINT_URL)
    findings = []
    if base.scheme != "https" and base.hostname not in _LOCAL:
        findings.append(
            failure(
                f"LORIKEET_BASE_URL is {settings.BASE_URL}: keys and passwords are not encrypted",
                "put a proxy with TLS in front and set its https address",
            )
        )
    if base.scheme == "https" and public.scheme != "https":
        findings.append(
            failure(
                f"S3_PUBLIC_ENDPOINT_URL is {settings.S3_PUBLIC_ENDPOINT_URL}: browsers refuse to "
                "upload from an https page to it",
                "set an https address",
            )
        )
    if settings.DEBUG:
        findings.append(failure("LORIKEET_DEBUG is on: errors show settings", "remove it"))
    if "*" in settings.ALLOWED_HOSTS:
        findings.append(warning("LORIKEET_ALLOWED_HOSTS has *", "name the console's hosts"))
    if "*" in settings.FORWARDED_ALLOW_IPS:
        findings.append(
            warning(
                "FORWARDED_ALLOW_IPS has *: everybody can forge an address",
                "name the proxy's address",
            )
        )
    if not settings.OPERATORS_NEED_SECOND_FACTOR:
        findings.append(
            warning("operators need no second factor", "remove LORIKEET_OPERATOR_SECOND_FACTOR")
        )
    yield from findings or [ok(f"{settings.BASE_URL}, {settings.S3_PUBLIC_ENDPOINT_URL}")]
