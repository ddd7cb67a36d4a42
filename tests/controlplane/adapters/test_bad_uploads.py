"""Every bad upload is rejected with its field, in bounded time, and leaves nothing in the store."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters import file_check, ingest, services, tasks
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.infra import sealed_child, storage
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.adapters.bad_uploads import BAD_UPLOADS
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, config_bytes
from tests.controlplane.conftest import Party

Status = AdapterVersion.Status
HOSTILE = "tests.contract.hostile_work"


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[None]:
    BaseModel.objects.update(known_names=["org/tiny"], revision="a" * 40)
    with tenant_scope(acme.tenant.id):
        yield


def staged(config: bytes, tensors: bytes, **fields: Any) -> AdapterVersion:
    """A version of the tenant in scope whose files wait for their check."""
    stated = {"adapter_config.json": len(config), "adapter_model.safetensors": len(tensors)}
    version = services.adapter_version_create(name="invoices", files=stated, **fields)
    storage.put_bytes(version.staged_config_key, config)
    storage.put_bytes(version.staged_tensors_key, tensors)
    AdapterVersion.objects.filter(pk=version.pk).update(status=Status.UPLOADED)
    return version


def checked(version: AdapterVersion) -> AdapterVersion:
    ingest.version_ingest(version.pk)
    version.refresh_from_db()
    return version


def stored(party: Party) -> list[str]:
    return list(storage.keys(f"t/{party.tenant.id}/"))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_there_are_enough() -> None:
    assert len(BAD_UPLOADS) >= 100


@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_bad_upload_is_rejected(scope: None, acme: Party, name: str) -> None:
    config, tensors, field = BAD_UPLOADS[name]
    before = _cpu_s()
    version = checked(staged(config, tensors))
    assert _cpu_s() - before < 5
    assert version.status == Status.REJECTED
    assert field in [reason["field"] for reason in version.reasons]
    assert len(json.dumps(version.reasons)) < 20_000
    assert (version.digest, stored(acme)) == ("", [])


class TestTheBase:
    def test_a_mismatch_can_be_accepted_for_one_version(self, scope: None) -> None:
        config = config_bytes(base_model_name_or_path="lab/our-copy-of-it")
        assert checked(staged(config, GOOD_TENSORS)).status == Status.REJECTED
        accepted = checked(staged(config, GOOD_TENSORS, accepts_base_mismatch=True))
        assert accepted.status == Status.READY
        assert accepted.report["claimed_base"] == "lab/our-copy-of-it"

    def test_nothing_is_compared_with_a_base_of_unknown_origin(self, scope: None) -> None:
        BaseModel.objects.update(known_names=[])
        config = config_bytes(base_model_name_or_path="lab/our-copy-of-it")
        assert checked(staged(config, GOOD_TENSORS)).status == Status.READY


class TestHostileFiles:
    """The check's process does its worst."""

    @pytest.fixture(autouse=True)
    def hostile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_check, "_MODULE", HOSTILE)
        monkeypatch.setattr(file_check, "_CPU_S", 1)

    @pytest.mark.parametrize(
        ("act", "cpu_s", "message"),
        [("hoard", 30, "192 MB of memory"), ("spin", 1, "1 s of CPU time")],
    )
    def test_what_needs_too_much_is_rejected(
        self,
        scope: None,
        acme: Party,
        monkeypatch: pytest.MonkeyPatch,
        act: str,
        cpu_s: int,
        message: str,
    ) -> None:
        monkeypatch.setattr(file_check, "_CPU_S", cpu_s)
        version = checked(staged(act.encode(), GOOD_TENSORS))
        assert version.status == Status.REJECTED
        assert message in version.reasons[0]["message"]
        assert stored(acme) == []

    @pytest.mark.parametrize("act", ["crash", "fail", "flood", "lie"])
    def test_what_breaks_the_check_is_rejected_and_the_operator_told(
        self, scope: None, acme: Party, act: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        version = checked(staged(act.encode(), GOOD_TENSORS))
        assert version.status == Status.REJECTED
        [reason] = version.reasons
        assert "send the operator" in reason["message"]
        [told] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert "secret" not in told.getMessage()
        assert stored(acme) == []

    def test_a_check_that_gets_no_time_is_done_again(
        self, scope: None, acme: Party, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(file_check, "_WALL_PER_CPU", 0.3)
        sent: list[tuple[str, str]] = []
        again = tasks.adapter_version_validate_again
        monkeypatch.setattr(again, "apply_async", lambda ids, **_: sent.append(ids))
        version = staged(b"hang", GOOD_TENSORS)
        with tenant_scope(acme.tenant.id):
            tasks.adapter_version_validate(str(acme.tenant.id), str(version.pk))
        assert sent == [(str(acme.tenant.id), str(version.pk))]
        monkeypatch.undo()
        storage.put_bytes(version.staged_config_key, GOOD_CONFIG)
        AdapterVersion.objects.update(config_num_bytes=len(GOOD_CONFIG))
        tasks.adapter_version_validate_again(*sent[0])
        version.refresh_from_db()
        assert version.status == Status.READY


def test_a_large_upload_fits_the_bounds(scope: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's memory does not depend on the file's size, and this process keeps no file."""
    peaks: list[int] = []
    run_sealed = sealed_child.run_sealed

    def noted(*args: Any, **named: Any) -> sealed_child.Ended:
        ended = run_sealed(*args, **named)
        peaks.append(ended.peak_bytes)
        return ended

    monkeypatch.setattr(sealed_child, "run_sealed", noted)
    checked(staged(GOOD_CONFIG, GOOD_TENSORS))
    checked(staged(GOOD_CONFIG, GOOD_TENSORS[:-4] + b"\0\0\0\0" + bytes(30 << 20)))
    assert peaks[0] < 40 << 20
    assert peaks[1] < peaks[0] + (8 << 20)


def test_checks_at_once_do_not_disturb_each_other(scope: None, tmp_path: Path) -> None:
    config, tensors = tmp_path / "c", tmp_path / "t"
    config.write_bytes(GOOD_CONFIG)
    tensors.write_bytes(GOOD_TENSORS)
    version = staged(GOOD_CONFIG, GOOD_TENSORS)
    found: list[int] = []
    base = AdapterVersion.objects.select_related("adapter__base_model").get(pk=version.pk)

    def check() -> None:
        found.append(file_check.files_check(base, config, tensors).max_rank)

    threads = [threading.Thread(target=check) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4] * 6
