"""What is said of a dataset's rows: counted by the real child, shown by the API and the console."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import tasks
from controlplane.training.datasets import reports
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, TrainingRun, dataset_key
from engine.text.codec import TextCodec
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.training.conftest import ROWS
from tests.tiny_base import TINY_NAME
from worker.training.chat_data import read_rows
from worker.training.row_tokens import encode_row

pytestmark = pytest.mark.django_db(transaction=True)
DATASETS = "/api/v1/datasets"
EVIL = "<script>alert(1)</script>"


def row(prompt: str, answer: str = "world") -> bytes:
    user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    return json.dumps({"messages": [user, assistant]}).encode() + b"\n"


def test_a_report_is_pending_until_the_inspector_has_counted(
    acme: Party, tiny_base: BaseModel, base_models_dir: Path, tmp_path: Path
) -> None:
    content = ROWS + row("hello 3") + row("long " * 600)
    client = as_key(acme)
    sent = client.generic("POST", f"{DATASETS}?name=chats", content)
    assert sent.status_code == 201, sent.json()
    report = client.get(f"{DATASETS}/chats/report").json()
    assert (report["status"], report["duplicates"], report["bases"]) == ("pending", None, {})

    tasks.dataset_report("")
    report = client.get(f"{DATASETS}/chats/report").json()
    assert (report["status"], report["num_rows"], report["sha256"]) == (
        "ready", 10, sent.json()["sha256"],
    )  # fmt: skip
    assert report["duplicates"] == {"count": 1, "lines": [[9, 4]]}
    (tmp_path / "rows").write_bytes(content)
    codec = TextCodec(base_models_dir / TINY_NAME)
    rows = [encode_row(codec, each)[0] for _, each in read_rows(tmp_path / "rows")]
    lengths = [len(each.token_ids) for each in rows]
    base = report["bases"][TINY_NAME]
    assert (base["tokens"], base["max"]) == (sum(lengths), lengths[-1])
    assert base["learned_tokens"] == sum(each.num_learned for each in rows)
    assert base["longer_than_context"] == {"count": 1, "lines": [[10, lengths[-1]]]}
    assert (base["refused"]["count"], base["epoch_s"]) == (0, None)
    assert report["added"] == {"num_rows": 10, "duplicates": {"count": 0, "lines": []}}
    # Of appended rows it says which were there before.
    client.generic("POST", f"{DATASETS}?name=chats&append=true", row("new") + row("hello 1") * 2)
    tasks.dataset_report("")
    report = client.get(f"{DATASETS}/chats/report").json()
    assert (report["version"], report["num_rows"], report["duplicates"]["count"]) == (2, 13, 3)
    assert report["added"] == {
        "num_rows": 3,
        "duplicates": {"count": 2, "lines": [[12, 2], [13, 2]]},
    }
    assert client.get(f"{DATASETS}/chats@1/report").json()["num_rows"] == 10
    # The same rows again keep their report; others make it pending.
    client.generic("POST", f"{DATASETS}?name=chats&append=true", row("hello 1") * 2)
    client.generic("POST", f"{DATASETS}?name=chats", content)
    tasks.dataset_report("")
    client.generic("POST", f"{DATASETS}?name=chats", content)
    assert client.get(f"{DATASETS}/chats/report").json()["status"] == "ready"
    client.generic("POST", f"{DATASETS}?name=chats", ROWS)
    assert client.get(f"{DATASETS}/chats/report").json()["status"] == "pending"


def test_both_answers_of_pairs_are_counted(
    acme: Party, tiny_base: BaseModel, base_models_dir: Path
) -> None:
    def pair(worse: str) -> bytes:
        asked = {"role": "user", "content": "hello"}
        answers = [[{"role": "assistant", "content": text}] for text in ("world", worse)]
        made = {"prompt": [asked], "chosen": answers[0], "rejected": answers[1]}
        return json.dumps(made).encode() + b"\n"

    client = as_key(acme)
    content = pair("how are you?") + pair("12") + pair("12")
    assert client.generic("POST", f"{DATASETS}?name=pairs", content).status_code == 201
    tasks.dataset_report("")
    report = client.get(f"{DATASETS}/pairs/report").json()
    assert (report["status"], report["num_rows"]) == ("ready", 3)
    assert report["duplicates"] == {"count": 1, "lines": [[3, 2]]}
    codec = TextCodec(base_models_dir / TINY_NAME)
    before = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    lengths = [
        len(codec.encode(f"{before}{text}<|im_end|>", add_special_tokens=False))
        for text in ("world", "how are you?", "world", "12", "world", "12")
    ]
    base = report["bases"][TINY_NAME]
    assert (base["tokens"], base["max"]) == (sum(lengths), max(lengths))


def test_arguments_of_calls_are_findings(acme: Party, tiny_base: BaseModel) -> None:
    def calling(arguments: str, **message: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        place = {"type": "string", "enum": ["home"]}
        tool = {"name": "f", "parameters": {"properties": {"place": place}}}
        said = [{"role": "user", "content": arguments}, {"role": "assistant", "tool_calls": [call]}]
        said[1] |= message
        end = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "no"}]
        return {"messages": said + end, "tools": [{"type": "function", "function": tool}]}

    home, moon = '{"place": "home"}', '{"place": "the moon"}'
    rows = [calling(home), calling(moon), calling(json.dumps(home)), calling(moon, weight=0)]
    rows.append(calling(json.dumps(moon)) | {"system": "s"})
    content = b"".join(json.dumps(each).encode() + b"\n" for each in rows)
    client = as_key(acme)
    assert client.generic("POST", f"{DATASETS}?name=calls", content).status_code == 201
    tasks.dataset_report("")
    report = client.get(f"{DATASETS}/calls/report").json()
    place = "messages[1].tool_calls[0]"
    assert report["arguments"] == {
        "unwrapped": {
            "count": 2,
            "lines": [[3, f"{place}.function.arguments"], [5, f"{place}.function.arguments"]],
        },
        # Without the words of the row, which fewer people may read.
        "invalid": {"count": 2, "lines": [[2, f"{place} at /place"], [5, f"{place} at /place"]]},
        "num_unchecked": 0,
    }
    page = browser_of(acme.viewer).get("/console/training/datasets/calls").content.decode()
    assert f"line 2, {place} at /place" in page and "the moon" not in page


def test_the_time_is_estimated_from_recent_runs(
    adapter: Adapter, dataset: Dataset, in_acme: Party
) -> None:
    for speed in (100.0, 300.0, 200.0):
        TrainingRun.objects.create(
            adapter=adapter,
            dataset=dataset,
            dataset_sha256=dataset.sha256,
            status="succeeded",
            finished_at=timezone.now(),
            progress={"tokens_per_s": speed},
        )
    dataset.report = {"bases": {TINY_NAME: {"tokens": 5000}}}
    base = reports.report_of(dataset)["bases"][TINY_NAME]
    assert (base["tokens_per_s"], base["epoch_s"]) == (200.0, 25.0)


def test_one_tenants_many_reports_delay_another_by_little(
    acme: Party, globex: Party, tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(reports, "_make", lambda dataset: made.append(dataset.tenant_id))
    for party, number in ((acme, 30), (globex, 1)):
        with tenant_scope(party.tenant.id):
            for index in range(number):
                dataset_services.dataset_upload(name=f"rows-{index}", content=ROWS)
    for _ in range(40):
        reports.report_next()
    assert globex.tenant.id in made


def test_a_report_of_rows_that_the_child_refuses_fails_and_says_so(
    in_acme: Party, tiny_base: BaseModel, dataset: Dataset
) -> None:
    """As rows do that were stored under earlier rules."""
    from controlplane.infra import storage

    storage.put_bytes(dataset.key, b"{}\n")
    assert reports.report_next()
    dataset.refresh_from_db()
    assert (dataset.report_status, dataset.report) == (
        "failed",
        {"error": "The report could not be made: upload the rows again, or tell the operator."},
    )  # fmt: skip
    assert not reports.report_next()


def test_old_reports_that_are_pending_are_asked_for_again(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(reports, "report_send", sent.append)
    tasks.datasets_sweep()
    assert sent == []  # its message is on its way
    then = timezone.now() - reports.RESEND - dt.timedelta(seconds=1)
    Dataset.objects.update(updated_at=then)
    tasks.datasets_sweep()
    assert sent == [dataset]


def test_the_preview_shows_the_first_rows(acme: Party, globex: Party) -> None:
    content = b"\n" + row(EVIL) + row("b" * 600_000) + row("c" * 600_000)
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="chats", content=content)
    client = as_key(acme)
    shown = client.get(f"{DATASETS}/chats/preview").json()
    assert [each["line"] for each in shown["data"]] == [2, 3]  # the third is cut
    assert shown["data"][0]["row"] == json.loads(row(EVIL))
    assert len(client.get(f"{DATASETS}/chats/preview?limit=1").json()["data"]) == 1
    before = row("a").replace(b"}\n", b', "id": 1e999}\n')  # was taken once
    with tenant_scope(acme.tenant.id):
        good = before.replace(b"1e999", b"11999")
        huge = dataset_services.dataset_upload(name="huge", content=good)
        storage.put_bytes(dataset_key(acme.tenant.id, huge.sha256), before)
    assert client.get(f"{DATASETS}/huge/preview").json()["data"][0]["row"]["id"] is None
    for limit in ("0", "101", "x", "-1", "9" * 5000):
        answer = client.get(f"{DATASETS}/chats/preview?limit={limit}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    for path in ("report", "preview"):
        assert as_key(globex).get(f"{DATASETS}/chats/{path}").status_code == 404

    page = browser_of(acme.viewer).get("/console/training/datasets/chats").content.decode()
    assert "alert(1)" not in page, "a viewer reads rows"
    page = browser_of(acme.owner).get("/console/training/datasets/chats").content.decode()
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "b" * 5000 not in page
    assert browser_of(globex.owner).get("/console/training/datasets/chats").status_code == 404
