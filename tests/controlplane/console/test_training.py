"""Datasets, runs and schedules in the console, on the real object store and broker."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from contract.training.daily_window import DailyWindow
from controlplane.adapters.models import BaseModel
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import Principal
from controlplane.tenants.models import Role
from controlplane.training.datasets.preview import rows_preview
from controlplane.training.models import Dataset, Schedule, TrainingRun
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import Belongings, browser_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
ROWS = (json.dumps(CHAT) + "\n").encode() * 3
SCHEDULE = {"dataset": "chats", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}


def upload(party: Party, content: bytes, name: str = "voice") -> Any:
    form = {"name": name, "file": SimpleUploadedFile("rows.jsonl", content)}
    return browser_of(party.owner).post("/console/training/datasets", form, follow=True)


def test_dataset_is_stored(acme: Party) -> None:
    answer = upload(acme, ROWS)
    assert answer.redirect_chain == [("/console/training", 302)]
    assert "“voice” is stored, with 3 chats." in answer.content.decode()
    with tenant_scope(acme.tenant.id):
        assert Dataset.objects.get(name="voice").num_rows == 3


SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def test_rows_of_other_formats_are_converted(acme: Party) -> None:
    content = json.dumps([SHAREGPT, {"instruction": "Hi", "output": "Hello"}], indent=1).encode()
    page = upload(acme, content).content.decode()
    assert "“voice” is stored, with 2 chats, converted from Alpaca, ShareGPT." in page
    with tenant_scope(acme.tenant.id):
        found = Dataset.objects.get(name="voice")
        owner = Principal(tenant=acme.tenant, role=Role.OWNER, user=acme.owner)
        assert [each["row"] for each in rows_preview(found, 9, by=owner)] == [CHAT, CHAT]


def test_rows_that_would_lose_something_are_refused_by_line_and_name(acme: Party) -> None:
    content = "\n".join(map(json.dumps, [SHAREGPT, SHAREGPT | {"images": ["cat.png"]}]))
    answer = upload(acme, content.encode())
    assert answer.status_code == 422
    assert "line 2: images is not text, and the models read only text" in answer.content.decode()


@pytest.mark.parametrize("content", [b"{not json}\n", b'{"messages": []}\n', b"\xff\xfe"], ids=repr)
def test_bad_dataset_says_why_beside_the_field(content: bytes, acme: Party) -> None:
    answer = upload(acme, content)
    assert answer.status_code == 422
    assert b'id="id_file_error"' in answer.content


PAIR = {"prompt": [CHAT["messages"][0]], "chosen": [CHAT["messages"][1]]}
PAIR["rejected"] = [{"role": "assistant", "content": "What?"}]


def test_a_run_over_pairs_shows_its_rewards(acme: Party, base_model: BaseModel) -> None:
    upload(acme, json.dumps(PAIR).encode() + b"\n" + json.dumps(PAIR).encode() + b"\n")
    browser = browser_of(acme.owner)
    form = {"adapter": "voice", "dataset": "voice", "method": "dpo", "beta": "0.2"}
    answer = browser.post("/console/training/runs", form)
    assert answer.status_code == 302
    rewards = {"reward_chosen": 0.25, "reward_rejected": -0.5, "reward_margin": 0.75}
    with tenant_scope(acme.tenant.id):
        run = TrainingRun.objects.get()
        assert run.hyperparameters == {"method": "dpo", "beta": 0.2}
        run.progress = {"step": 1, "steps": 2, "loss": 0.4, "reward_accuracy": 0.9, **rewards}
        run.save()
    page = browser.get(answer.url).content.decode()
    assert "preferred 0.250, other -0.500, margin 0.750" in page
    assert "has the higher reward in 0.90 of the step" in page
    form["method"] = "supervised"
    refusal = browser.post("/console/training/runs", form)
    assert refusal.status_code == 422 and b"is for the method dpo" in refusal.content


PROMPT = {"messages": [CHAT["messages"][0]], "wanted": "Hello", "tone": ["kind"]}
WANTED = {
    "type": "string_check", "input": "{{ sample.output_text }}",
    "reference": "{{ item.wanted }}", "operation": "eq",
}  # fmt: skip


def test_a_run_by_reinforcement_shows_rewards_and_answers(
    acme: Party, base_model: BaseModel
) -> None:
    upload(acme, json.dumps(PROMPT).encode() + b"\n" + json.dumps(PROMPT).encode() + b"\n")
    browser = browser_of(acme.owner)
    parts = {"kind": WANTED, "equal": WANTED}
    grader = {"type": "multi", "graders": parts, "calculate_output": "kind * equal"}
    form = {"adapter": "voice", "dataset": "voice", "method": "reinforcement", "samples": "4"}
    answer = browser.post("/console/training/runs", form | {"grader": json.dumps(grader)})
    assert answer.status_code == 302, answer.content
    figures = {"reward": 0.25, "kl": 0.01, "entropy": 1.5, "clipped": 0, "reward_kind": 0.75}
    figures |= {"answer_tokens": 7.5, "cut_answers": 0.5, "mismatch": 0, "mismatch_share": 0}
    shown = [{"line": 2, "answer": "<b>Hello", "reward": 1}]
    with tenant_scope(acme.tenant.id):
        run = TrainingRun.objects.get()
        wanted = {"method": "reinforcement", "grader": grader, "samples": 4}
        assert run.hyperparameters == wanted
        run.progress = {"step": 1, "steps": 2, "loss": 0.4, "samples": shown, **figures}
        run.save()
    page = browser.get(answer.url).content.decode()
    for told in (
        *("0.250 in the mean of the step", "; kind 0.750<", "0.0100 (KL of a token)"),
        *("entropy 1.500", "differ by 0.000000", "1.000, line 2", "&lt;b&gt;Hello"),
    ):
        assert told in page, told
    wrong = form | {"grader": json.dumps(WANTED | {"operation": "is"})}
    refusal = browser.post("/console/training/runs", wrong)
    assert refusal.status_code == 422 and b"must be one of eq, ne, like, ilike" in refusal.content


def test_run_starts_and_can_be_cancelled(acme: Party, base_model: BaseModel, settings: Any) -> None:
    upload(acme, ROWS)
    browser = browser_of(acme.owner)
    form = {"adapter": "voice", "dataset": "voice", "rank": "4"}
    answer = browser.post("/console/training/runs", form)
    assert answer.status_code == 302
    page = browser.get(answer.url).content.decode()
    assert "Waiting for a trainer" in page
    assert f'hx-get="{answer.url}/status"' in page
    opens_at = timezone.now() + dt.timedelta(hours=2)
    end = opens_at + dt.timedelta(hours=1)
    settings.TRAINING_WINDOW = DailyWindow.parse(f"{opens_at:%H:%M}-{end:%H:%M}")
    page = browser.get(answer.url).content.decode()
    assert f"which opens on {opens_at:%-d %B, %H:%M} UTC" in page
    browser.post(f"{answer.url}/cancel")
    with tenant_scope(acme.tenant.id):
        run = TrainingRun.objects.get()
    assert (run.status, run.hyperparameters) == ("cancelled", {"rank": 4})
    assert "hx-trigger" not in browser.get(answer.url).content.decode()


def test_bad_hyperparameter_is_said_of_its_field(acme: Party, base_model: BaseModel) -> None:
    upload(acme, ROWS)
    form = {"adapter": "voice", "dataset": "voice", "rank": "0"}
    answer = browser_of(acme.owner).post("/console/training/runs", form)
    assert answer.status_code == 422
    assert b'id="id_rank_error"' in answer.content


def test_run_shows_its_progress(acme: Party, belongings: Belongings) -> None:
    url = f"/console/training/runs/{belongings.run.id}"
    page = browser_of(acme.viewer).get(url).content.decode()
    assert "Step 3 of 10" in page
    assert '<polyline class="curve" points="0.0,0.0 600.0,160.0"/>' in page


@pytest.mark.parametrize("path", ["/console/training", "/console/adapters/invoices"])
def test_lists_ask_again_while_a_run_goes_on(
    path: str, acme: Party, belongings: Belongings
) -> None:
    browser = browser_of(acme.viewer)
    assert f'hx-get="{path}" hx-select="#runs"' in browser.get(path).content.decode()
    with tenant_scope(acme.tenant.id):
        TrainingRun.objects.update(status=TrainingRun.Status.SUCCEEDED)
    assert 'hx-select="#runs"' not in browser.get(path).content.decode()


def test_schedule_is_set_changed_and_removed(acme: Party, belongings: Belongings) -> None:
    browser = browser_of(acme.owner)
    url = "/console/adapters/invoices/schedule"
    assert browser.post(url, SCHEDULE).status_code == 302
    assert b"30 2 * * *" in browser.get("/console/adapters/invoices").content
    assert browser.post(url, SCHEDULE | {"is_paused": "on"}).status_code == 302
    with tenant_scope(acme.tenant.id):
        schedule = Schedule.objects.get()
        assert (schedule.timezone, schedule.is_paused) == ("Europe/Berlin", True)
        browser.post(f"{url}/delete")
        assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    ("field", "value"), [("cron", "every night"), ("timezone", "Mars/Base"), ("dataset", "other")]
)
def test_bad_schedule_says_why_beside_the_field(
    field: str, value: str, acme: Party, belongings: Belongings
) -> None:
    answer = browser_of(acme.owner).post(
        "/console/adapters/invoices/schedule", SCHEDULE | {field: value}
    )
    assert answer.status_code == 422
    assert f'id="id_{field}_error"'.encode() in answer.content


def test_all_faults_of_a_schedule_are_told_at_once(acme: Party, belongings: Belongings) -> None:
    wrong = {"cron": "every night", "timezone": "Mars/Base", "window": "25", "grace_minutes": "0"}
    answer = browser_of(acme.owner).post("/console/adapters/invoices/schedule", SCHEDULE | wrong)
    assert answer.status_code == 422
    page = answer.content.decode()
    assert [field for field in wrong if f'id="id_{field}_error"' not in page] == []


def test_stranger_neither_reads_nor_uses_the_dataset(
    acme: Party, globex: Party, belongings: Belongings
) -> None:
    browser = browser_of(globex.owner)
    assert b"chats" not in browser.get("/console/training").content.replace(b"your own chats", b"")
    answer = browser.post("/console/training/runs", {"adapter": "mine", "dataset": "chats"})
    assert answer.status_code == 422


def test_the_form_says_what_a_run_takes_and_what_is_wrong_beside_its_field(
    acme: Party, base_model: BaseModel
) -> None:
    upload(acme, ROWS)
    browser = browser_of(acme.owner)
    page = browser.get("/console/training").content.decode()
    assert 'hx-post="/console/training/cost"' in page
    form = {"adapter": "voice", "dataset": "voice", "epochs": "4", "batch_size": "1"}
    more = {
        "gradient_accumulation": "3",
        "checkpoints": "2",
        "draft_heads": "3",
        "method": "supervised",
        "gradient_checkpointing": "on",
    }

    def cost(**fields: str) -> str:
        answer = browser.post("/console/training/cost", form | more | fields)
        assert answer.status_code == 200
        return answer.content.decode()

    assert "4 steps over at most 6,144 tokens." in cost()
    assert "2 checkpoints count" in cost()
    # Rows that are kept to validate with are not trained on.
    alone = {"gradient_accumulation": "1", "epochs": "6"}
    assert "18 steps over at most" in cost(**alone)
    half = cost(validation_share="0.5", **alone)
    assert "About 6 steps over at most" in half and "of about 1 row:" in half
    # With a report, and runs whose speed is known.
    bases = {base_model.name: {"tokens": 100}}
    with tenant_scope(acme.tenant.id):
        Dataset.objects.update(report={"bases": bases}, report_status="ready")
    assert "4 steps over about 400 tokens." in cost()
    run = browser.post("/console/training/runs", form | more).url.rpartition("/")[2]
    with tenant_scope(acme.tenant.id):
        runs = TrainingRun.objects.filter(pk=run)
        assert runs.get().hyperparameters == {
            **{"epochs": 4.0, "batch_size": 1, "gradient_accumulation": 3, "checkpoints": 2},
            **{"gradient_checkpointing": True, "draft_heads": 3},
        }
        runs.update(status="succeeded", finished_at=timezone.now(), progress={"tokens_per_s": 8.0})
    assert "about 400 tokens, in about 50 s" in cost()
    assert "Batches of a step: Ensure this value is less than" in cost(gradient_accumulation="999")
    answer = browser.post("/console/training/runs", form | {"checkpoints": "11", "rank": "0"})
    assert answer.status_code == 422
    for name in ("checkpoints", "rank"):
        assert f'id="id_{name}_error"' in answer.content.decode()
