"""deploy/init.py: secrets are made once, handed out to those who need them, and checked."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import demo.certificates
from deploy import init

ADDRESSES = {
    "LORIKEET_BASE_URL": "http://127.0.0.1:8000",
    "S3_PUBLIC_ENDPOINT_URL": "http://127.0.0.1:8333",
}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything belongs to this account: only root may give files away."""
    me = os.getuid()
    monkeypatch.setattr(init, "SECRETS", tmp_path / "secrets")
    monkeypatch.setattr(init, "VOLUMES", tmp_path / "volumes")
    monkeypatch.setattr(init, "KEPT", tmp_path / "secrets" / "init")
    monkeypatch.setattr(init, "ROOT", me)
    monkeypatch.setattr(
        init, "READERS", {name: (me, names) for name, (_, names) in init.READERS.items()}
    )
    monkeypatch.setattr(init, "OWNERS", dict.fromkeys(init.OWNERS, me))
    monkeypatch.setattr(init, "OBJECTS", me)
    monkeypatch.setitem(__import__("sys").modules, "certificates", demo.certificates)
    return tmp_path


def handed_out(folder: Path) -> dict[str, dict[str, str]]:
    return {
        service: {name: (folder / "secrets" / service / name).read_text() for name in names}
        for service, (_, names) in init.READERS.items()
    }


def test_secrets_are_made_once_and_fit_each_other(folders: Path) -> None:
    assert init.main(ADDRESSES) == 0
    first = handed_out(folders)
    assert init.main(ADDRESSES) == 0
    assert handed_out(folders) == first
    assert len(set(first["postgres"].values())) == 3
    assert len(first["application"]["LORIKEET_KEY_PEPPER"]) == 64
    owner = urlsplit(first["migrate"]["DATABASE_OWNER_URL"])
    assert owner.password == first["postgres"]["POSTGRES_OWNER_PASSWORD"]
    redis = urlsplit(first["worker"]["REDIS_URL"])
    assert redis.password == first["redis"]["REDIS_PASSWORD"]


def test_only_its_reader_may_read_a_secret(folders: Path) -> None:
    init.main(ADDRESSES)
    files = [path for path in (folders / "secrets").rglob("*") if path.is_file()]
    assert len(files) > 20
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o400}
    for service in init.READERS:
        assert stat.S_IMODE((folders / "secrets" / service).stat().st_mode) == 0o500


def test_what_env_gives_wins_over_what_was_made(folders: Path) -> None:
    init.main(ADDRESSES)
    made = handed_out(folders)
    given = {"POSTGRES_APP_PASSWORD": 'a "p"@/ $x', "REDIS_URL": "redis://elsewhere:6379/4"}
    assert init.main(ADDRESSES | given) == 0
    now = handed_out(folders)
    assert now["postgres"]["POSTGRES_APP_PASSWORD"] == given["POSTGRES_APP_PASSWORD"]
    password = urlsplit(now["application"]["DATABASE_URL"]).password
    assert unquote(password or "") == given["POSTGRES_APP_PASSWORD"]
    assert now["worker"]["REDIS_URL"] == given["REDIS_URL"]
    assert init.main(ADDRESSES) == 0
    assert handed_out(folders) == made


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LORIKEET_SECRET_KEY": "change-me"}, "LORIKEET_SECRET_KEY in .env still says change-me"),
        ({"REDIS_URL": "redis://:change-me@redis/0"}, "REDIS_URL in .env still says change-me"),
        ({"LORIKEET_BASE_URL": "lorikeet.example"}, "LORIKEET_BASE_URL in .env is"),
        ({"S3_PUBLIC_ENDPOINT_URL": "s3://x"}, "S3_PUBLIC_ENDPOINT_URL in .env is"),
        ({"REDIS_PASSWORD": "two words"}, "REDIS_PASSWORD in .env has"),
        ({"S3_SECRET_ACCESS_KEY": 'quo"ted'}, "S3_SECRET_ACCESS_KEY in .env has"),
        ({"POSTGRES_PASSWORD": "two\nlines"}, "POSTGRES_PASSWORD in .env has"),
    ],
)
def test_what_cannot_be_is_named(
    variables: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init.main(ADDRESSES | variables) == 2
    assert said in capsys.readouterr().err
