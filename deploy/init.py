"""Make the secrets of an installation and set the owners of its volumes, before anything starts.

Compose runs this as root and without a network. Each service has its own volume of secrets, here
/secrets/SERVICE, in which only the service's account can read the files. A secret in .env is used
unchanged; other secrets are made once and kept. A second run changes nothing.

Exit codes: 0 · 2 a value in .env is invalid; standard error names it.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlsplit

SECRETS = Path("/secrets")
VOLUMES = Path("/volumes")
#: Folder of the generated secrets; no other container mounts it.
KEPT = SECRETS / "init"
#: The accounts of the containers. 999 is the account of PostgreSQL and of Redis in their images.
ROOT, LORIKEET, DATABASE, OBJECTS = 0, 10001, 999, 10002
#: Those of Prometheus and of Grafana in their images.
PROMETHEUS, GRAFANA = 65534, 472
#: Volume of data -> its owner.
OWNERS = {
    "postgres": DATABASE,
    "redis": DATABASE,
    "seaweedfs": OBJECTS,
    "model": LORIKEET,
    "adapters": LORIKEET,
    "training": LORIKEET,
    "training-socket": LORIKEET,
    "ingest": LORIKEET,
    "backup": LORIKEET,
    "prometheus": PROMETHEUS,
    "grafana": GRAFANA,
}
#: Secrets that are made if .env does not set them.
MADE = (
    "LORIKEET_SECRET_KEY",
    "LORIKEET_KEY_PEPPER",
    "POSTGRES_PASSWORD",
    "POSTGRES_OWNER_PASSWORD",
    "POSTGRES_APP_PASSWORD",
    "REDIS_PASSWORD",
    "S3_ACCESS_KEY_ID",
    "S3_SECRET_ACCESS_KEY",
    "GRAFANA_PASSWORD",
)
#: Addresses that contain those secrets, unless .env sets them.
ADDRESSES = ("DATABASE_URL", "DATABASE_OWNER_URL", "REDIS_URL", "CELERY_BROKER_URL")
#: Secrets that only .env can set; their files are empty otherwise.
GIVEN = (
    "LORIKEET_ACCEPTED_PEPPERS",
    "EMAIL_URL",
    "LORIKEET_OIDC_CLIENT_SECRET",
    "HF_TOKEN",
)

_S3 = ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY")
_QUEUES = ("DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL", *_S3)
_APPLICATION = (
    "LORIKEET_SECRET_KEY",
    "LORIKEET_KEY_PEPPER",
    *_QUEUES,
    "LORIKEET_ACCEPTED_PEPPERS",
    "EMAIL_URL",
    "LORIKEET_OIDC_CLIENT_SECRET",
)
#: Volume of secrets -> its owner and the secrets in it.
READERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "postgres": (
        DATABASE,
        ("POSTGRES_PASSWORD", "POSTGRES_OWNER_PASSWORD", "POSTGRES_APP_PASSWORD"),
    ),
    "redis": (DATABASE, ("REDIS_PASSWORD",)),
    "seaweedfs": (OBJECTS, _S3),
    "application": (LORIKEET, _APPLICATION),
    "migrate": (LORIKEET, (*_APPLICATION, "DATABASE_OWNER_URL")),
    "tasks": (LORIKEET, _QUEUES),
    "model": (LORIKEET, (*_QUEUES, "HF_TOKEN")),
    "trainer": (LORIKEET, _QUEUES),
    "worker": (LORIKEET, ("REDIS_URL", *_S3)),
    "grafana": (GRAFANA, ("GRAFANA_PASSWORD",)),
}


class Refused(Exception):
    """An invalid value in .env; the message names it and says what to do."""


def main(environment: Mapping[str, str]) -> int:
    try:
        check(environment)
        values = secrets_of(environment)
        for service, (owner, names) in READERS.items():
            hand_out(SECRETS / service, owner, {name: values[name] for name in names})
        certificate(SECRETS / "seaweedfs", OBJECTS)
        for volume, owner in OWNERS.items():
            give(VOLUMES / volume, owner)
    except Refused as error:
        sys.stderr.write(f"init: {error}\n")
        return 2
    except OSError as error:
        hint = "; the disk is full: make room for Docker's volumes"
        sys.stderr.write(f"init: {error}{hint if error.errno == errno.ENOSPC else ''}\n")
        return 2
    return 0


def check(environment: Mapping[str, str]) -> None:
    """Raise Refused for values that would fail later, with a less clear message."""
    for name, value in sorted(environment.items()):
        if "change-me" in value:
            raise Refused(f"{name} in .env still says change-me: give it a value, or remove it")
    for name in ("LORIKEET_BASE_URL", "S3_PUBLIC_ENDPOINT_URL"):
        parts = urlsplit(environment.get(name, ""))
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
            raise Refused(
                f"{name} in .env is {environment.get(name)!r}: write an address such as "
                "https://lorikeet.example.org, without a path"
            )
    for name in MADE:
        if any(character in environment.get(name, "") for character in "\r\n\0"):
            raise Refused(f"{name} in .env has a line break")
    # Other programs' configuration files contain them.
    for name in ("REDIS_PASSWORD", *_S3):
        if any(
            not "!" <= character <= "~" or character in "\"'\\#"
            for character in environment.get(name, "")
        ):
            raise Refused(f"{name} in .env has spaces, quotes, or letters beyond ASCII")


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return all secrets: those of .env, those of an earlier start, and new ones."""
    KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {name: environment.get(name) or _kept(name) for name in MADE}
    redis = f"redis://:{quote(values['REDIS_PASSWORD'], safe='')}@redis:6379"
    made = {
        "DATABASE_URL": _database("lorikeet_app", values["POSTGRES_APP_PASSWORD"]),
        "DATABASE_OWNER_URL": _database("lorikeet", values["POSTGRES_OWNER_PASSWORD"]),
        "REDIS_URL": f"{redis}/0",
        "CELERY_BROKER_URL": f"{redis}/1",
    }
    values |= {name: environment.get(name) or made[name] for name in ADDRESSES}
    return values | {name: environment.get(name, "") for name in GIVEN}


def _database(role: str, password: str) -> str:
    return f"postgresql://{role}:{quote(password, safe='')}@postgres:5432/lorikeet"


def _kept(name: str) -> str:
    path = KEPT / name
    if not path.exists():
        write(path, secrets.token_hex(32), owner=ROOT)
    return path.read_text()


def hand_out(folder: Path, owner: int, values: Mapping[str, str]) -> None:
    """Write these secrets into the folder, as files that only `owner` can read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        write(folder / name, value, owner=owner)
    os.chown(folder, owner, owner)
    folder.chmod(0o500)


def write(path: Path, text: str, *, owner: int) -> None:
    """Write a file atomically and never readable by others; keep it if it is the same."""
    if path.exists() and path.read_text() == text and path.stat().st_uid == owner:
        return
    staging = path.with_name(f".{path.name}.new")
    staging.unlink(missing_ok=True)
    with os.fdopen(os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400), "w") as file:
        file.write(text)
        os.fchown(file.fileno(), owner, owner)
    staging.replace(path)


def certificate(folder: Path, owner: int) -> None:
    """Make, once, the certificate with which SeaweedFS's parts authenticate each other."""
    from certificates import ensure_certificate

    for path in ensure_certificate(folder):
        os.chown(path, owner, owner)
        path.chmod(0o400)


def give(folder: Path, owner: int) -> None:
    """Make the service's account the owner of a volume; before, some belonged to root."""
    if not folder.is_dir() or folder.stat().st_uid == owner:
        return
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(root, name), owner, owner, follow_symlinks=False)
    # Change the owner last: the next start then repeats an interrupted change.
    os.chown(folder, owner, owner)


if __name__ == "__main__":
    sys.exit(main(os.environ))
