"""A backup brings everything back into new servers; one that is broken names its broken part."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.controlplane.maintenance.installation import Installation, Make


@pytest.fixture(scope="module")
def source(installed: Make) -> Installation:
    made = installed("source")
    made.python("-m", "tests.live_seed")
    made.put("t/large", os.urandom(18 << 20))
    made.put("t/empty", b"")
    return made


@pytest.fixture(scope="module")
def backup(source: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backup") / "made"
    source.manage("backup", str(folder))
    return folder


@pytest.fixture
def copy(backup: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the backup, to damage."""
    shutil.copytree(backup, tmp_path / "copy", copy_function=os.link)
    yield tmp_path / "copy"


def newest(folder: Path) -> Path:
    return sorted(folder.glob("backups/*"))[-1]


def test_everything_is_there_after_all_was_lost(
    installed: Make, source: Installation, backup: Path
) -> None:
    target = installed("target", is_migrated=False)
    said = target.manage("restore", str(backup))
    assert "next: run `manage.py verify_audit`" in said
    before, after = source.rows(), target.rows()
    before["audit_auditevent"] += 1  # that it was restored
    # What `migrate` itself keeps: the same models, whose rows it makes.
    assert after == before
    assert target.objects() == source.objects()
    assert json.loads(target.manage("verify_audit"))["faults"] == {}
    # The walls stand: forced policies, rights, the trigger of the audit trail.
    found = "select relname, relforcerowsecurity from pg_class where relrowsecurity order by 1"
    assert target.query(found) == source.query(found)
    rights = (
        "select table_name, grantee, privilege_type from information_schema.role_table_grants "
        "where table_schema = 'public' order by 1, 2, 3"
    )
    assert target.query(rights) == source.query(rights)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        target.query("delete from audit_auditevent")
    assert "No changes" in target.manage("makemigrations", "--check", "--dry-run")
    # A backup of what was restored is the same again.
    again = backup.with_name("again")
    target.manage("backup", str(again))
    counts = [json.loads((newest(made) / "manifest.json").read_text()) for made in (backup, again)]
    assert counts[0]["objects"] == counts[1]["objects"]


def test_a_manifest_says_what_there_is_and_no_secret(source: Installation, backup: Path) -> None:
    manifest = json.loads((newest(backup) / "manifest.json").read_text())
    assert manifest["tables"] == source.rows()
    assert manifest["migrations"]["tenants"][0] == "0001_initial"
    # live_seed makes one adapter of each tenant whose bytes are not in the store.
    assert manifest["num_missing"] == 4
    env = source.env
    secrets = ["LORIKEET_KEY_PEPPER", "LORIKEET_SECRET_KEY", "S3_SECRET_ACCESS_KEY"]
    secrets += ["S3_ACCESS_KEY_ID"]
    for path in newest(backup).iterdir():
        content = path.read_bytes()
        assert not [name for name in secrets if env[name].encode() in content], path
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_second_backup_copies_only_what_is_new(source: Installation, copy: Path) -> None:
    before = {path.name for path in copy.glob("objects/*/*")}
    source.put("t/new", b"new bytes")
    said = source.manage("backup", str(copy), "--keep", "1")
    assert "1 copied" in said
    assert "removed 1 older backups" in said
    after = {path.name for path in copy.glob("objects/*/*")}
    assert len(after - before) == 1
    assert len(list(copy.glob("backups/*"))) == 1
    # What no backup has any more goes with the last that had it.
    source.s3.delete_object(Bucket=source.env["S3_BUCKET"], Key="t/new")
    source.manage("backup", str(copy), "--keep", "1")
    assert {path.name for path in copy.glob("objects/*/*")} == before
    assert "is complete" in source.manage("restore", str(copy), "--check")


def replace(path: Path, content: bytes) -> None:
    """Other content in a new file: the backup's own shares the old one."""
    path.unlink()
    path.write_bytes(content)


def test_a_broken_backup_is_refused_by_the_name_of_the_part(
    source: Installation, copy: Path
) -> None:
    target = source  # it is not touched: the check comes first

    def said() -> str:
        return target.refused("restore", str(copy), "--check")

    made = newest(copy)
    large = max(copy.glob("objects/*/*"), key=lambda path: path.stat().st_size)
    content = large.read_bytes()
    replace(large, content[:-1])
    assert f"{large} (the object t/large) is incomplete" in said()
    replace(large, bytes([content[0] ^ 1]) + content[1:])  # it is random: no byte is surely another
    assert f"{large} (the object t/large) is damaged" in said()
    large.unlink()
    assert f"{large} (the object t/large) cannot be read: No such file" in said()
    large.write_bytes(content)
    dump = made / "database.dump"
    kept = dump.read_bytes()
    replace(dump, kept[: len(kept) // 2])
    assert f"{dump} is incomplete" in said()
    replace(dump, kept)
    replace(made / "objects.sqlite", b"x" * (made / "objects.sqlite").stat().st_size)
    assert f"{made}/objects.sqlite is damaged" in said()
    replace(made / "manifest.json", b"{")
    assert f"{made}/manifest.json cannot be read" in said()
    made.rename(made.with_name(f"{made.name}.incomplete"))
    assert "there is no complete backup in" in said()


def test_a_restore_replaces_nothing_unless_it_is_told_to(
    installed: Make, source: Installation, backup: Path
) -> None:
    assert "the database has 2 tenants: --force replaces" in source.refused("restore", str(backup))
    target = installed("used", is_migrated=False)
    target.put("t/somebodys", b"words")
    assert "has objects, as t/somebodys: --force" in target.refused("restore", str(backup))
    with psycopg.connect(target.env["DATABASE_URL"]):
        assert "connected to the database (1 of lorikeet_app): stop" in target.refused(
            "restore", str(backup), "--force"
        )
    target.manage("restore", str(backup), "--force")
    assert target.query("select count(*) from tenants_tenant") == [(2,)]
    # Again, over what is there.
    target.manage("restore", str(backup), "--force")
    assert target.query("select count(*) from tenants_tenant") == [(2,)]
    target.close()
    target.env["LORIKEET_KEY_PEPPER"] = "another"
    said = target.manage("restore", str(backup), "--force")
    assert "LORIKEET_KEY_PEPPER is not the pepper of 2 API keys" in said


def test_a_backup_of_a_newer_version_is_refused(
    installed: Make, source: Installation, copy: Path
) -> None:
    path = newest(copy) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["migrations"]["tenants"].append("9999_of_tomorrow")
    replace(path, json.dumps(manifest).encode())
    target = installed("newer", is_migrated=False)
    said = target.refused("restore", str(copy))
    assert (
        "of a newer version: this one does not know the migration tenants.9999_of_tomorrow" in said
    )


@pytest.mark.long
def test_a_backup_of_an_older_version_is_migrated(installed: Make, tmp_path: Path) -> None:
    old = installed("older")
    old.manage("migrate", "webhooks", "zero", "--verbosity=0")
    old.manage("backup", str(tmp_path / "made"))
    target = installed("migrated", is_migrated=False)
    target.manage("restore", str(tmp_path / "made"))
    assert target.query("select count(*) from webhooks_webhookendpoint") == [(0,)]


def test_two_backups_do_not_write_into_one_folder_at_once(
    source: Installation, tmp_path: Path
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is writing to" in source.refused("backup", str(tmp_path))


def test_rows_that_the_dump_would_not_see_stop_it(installed: Make, tmp_path: Path) -> None:
    made = installed("hidden")
    with psycopg.connect(made.env["DATABASE_OWNER_URL"]) as connection:
        connection.execute("drop policy operator_all on tenants_apikey")
    said = made.refused("backup", str(tmp_path / "made"))
    assert "lorikeet_operator does not see all rows of tenants_apikey" in said
    assert list((tmp_path / "made").glob("backups/*")) == []
