"""/v1/fine_tuning/jobs through the official client and raw requests, against a live server."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent

from tests.fakes import FAKE_NAME
from tests.live import wait_for
from tests.site import Site

JOBS = "/v1/fine_tuning/jobs"
ROWS = b"".join(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": f"hello {number}"},
                {"role": "assistant", "content": "world"},
            ]
        }
    ).encode()
    + b"\n"
    for number in range(20)
)


@pytest.fixture(autouse=True)
def _no_jobs(site: Site) -> Iterator[None]:
    """The tenants may have few at a time."""
    yield
    with site.database() as connection:
        connection.execute("update training_trainingrun set status = 'cancelled'")


def upload(site: Site, tenant: str = "acme", rows: bytes = ROWS, **fields: Any) -> str:
    fields = {"purpose": "fine-tune", **fields}
    return site.client(tenant).files.create(file=("chats.jsonl", io.BytesIO(rows)), **fields).id


def create(site: Site, tenant: str = "acme", **fields: Any) -> FineTuningJob:
    fields.setdefault("training_file", upload(site, tenant))
    return site.client(tenant).fine_tuning.jobs.create(**{"model": FAKE_NAME, **fields})


def refused(site: Site, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a body that is not accepted."""
    body = {"model": FAKE_NAME, "training_file": "file-" + "0" * 32, **body}
    answer = site.send("POST", JOBS, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_job_is_a_training_run_and_waits_for_a_trainer(site: Site) -> None:
    client, before = site.client(), time.time()
    file = upload(site)
    job = client.fine_tuning.jobs.create(
        model=FAKE_NAME,
        training_file=file,
        suffix="greeter",
        seed=7,
        metadata={"team": "support"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.5}},
        },
        extra_body={"lorikeet": {"rank": 4, "alpha": 8, "target_modules": ["q_proj"]}},
    )
    assert re.fullmatch(r"ftjob-[0-9a-f]{32}", job.id)
    assert (job.object, job.status, job.model) == ("fine_tuning.job", "queued", FAKE_NAME)
    assert before - 2 <= job.created_at <= time.time()
    assert (job.training_file, job.validation_file, job.seed) == (file, None, 7)
    assert (job.finished_at, job.fine_tuned_model, job.error) == (None, None, None)
    assert (job.result_files, job.trained_tokens, job.estimated_finish) == ([], None, None)
    assert (job.organization_id, job.metadata) == ("acme", {"team": "support"})
    assert job.hyperparameters.to_dict() == {
        "n_epochs": 2,
        "batch_size": 8,
        "learning_rate_multiplier": 0.5,
    }
    assert job.method is not None and job.method.type == "supervised"
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    # The same object at the other address.
    ours: dict[str, Any] = job.lorikeet  # type: ignore[attr-defined]
    run = site.send("GET", f"/api/v1/training-runs/{ours['training_run']}").json()
    assert (run["adapter"], run["status"], run["dataset"]) == ("greeter", "queued", None)
    assert run["hyperparameters"] == ours["hyperparameters"]
    assert run["hyperparameters"] == {
        **{"epochs": 2, "batch_size": 8, "learning_rate": 0.0005, "seed": 7},
        **{"rank": 4, "alpha": 8, "target_modules": ["q_proj"]},
    }
    events = client.fine_tuning.jobs.list_events(job.id).data
    assert [event.message for event in reversed(events)] == [
        f"Created fine-tuning job: {job.id}",
        f"Validated training file: {file}",
        "Files validated, moving job to queued state",
    ]
    assert {(event.level, event.type) for event in events} == {("info", "message")}
    assert client.fine_tuning.jobs.checkpoints.list(job.id).data == []
    # The file may go: the job has its own copy of the rows.
    client.files.delete(file)
    assert client.fine_tuning.jobs.retrieve(job.id).status == "queued"


def test_auto_and_what_is_left_out_are_the_same_and_depend_on_the_rows(site: Site) -> None:
    plain = create(site)
    auto = create(
        site,
        hyperparameters={
            "n_epochs": "auto",
            "batch_size": "auto",
            "learning_rate_multiplier": "auto",
        },
    )
    expected = {
        "n_epochs": 5,
        "batch_size": 8,
        "learning_rate_multiplier": 1,
    }
    assert plain.hyperparameters.to_dict() == auto.hyperparameters.to_dict() == expected
    two = create(site, training_file=upload(site, rows=b"\n".join(ROWS.splitlines()[:2])))
    assert two.hyperparameters.to_dict() == expected | {"n_epochs": 25, "batch_size": 2}


def test_pages_and_metadata_filters(site: Site) -> None:
    client, file = site.client("globex"), upload(site, "globex")
    made = [
        create(site, "globex", training_file=file, metadata=metadata).id
        for metadata in ({"team": "a", "run": "1"}, {"team": "a"}, {"team": ""}, None)
    ]

    def listed(query: str) -> list[str]:
        answer = site.send("GET", f"{JOBS}?{query}", "globex")
        assert answer.status_code == 200, answer.text
        return [job["id"] for job in answer.json()["data"]]

    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)][:4] == made[::-1]
    first = client.fine_tuning.jobs.list(limit=3)
    assert first.has_more
    assert client.fine_tuning.jobs.list(after=made[1], limit=3).data[0].id == made[0]
    found = client.fine_tuning.jobs.list(metadata={"team": "a"})
    assert [job.id for job in found] == [made[1], made[0]]
    assert listed("metadata[team]=a&metadata[run]=1") == [made[0]]
    assert listed("metadata[team]=") == [made[2]]
    assert listed("metadata=null")[0] == made[3] and made[2] not in listed("metadata=null")
    for query in (
        *("metadata=null&metadata[team]=a", "metadata=x", "after=nothing", "limit=0"),
        *("metadata[]=a", f"metadata[{'k' * 65}]=a", "metadata[team=a"),
    ):
        assert site.send("GET", f"{JOBS}?{query}", "globex").status_code == 400


def test_pause_keeps_a_job_from_a_trainer_and_resume_and_cancel_end_that(site: Site) -> None:
    jobs, job = site.client().fine_tuning.jobs, create(site)
    assert jobs.pause(job.id).status == "paused"
    assert jobs.pause(job.id).status == "paused"
    assert jobs.resume(job.id).status == "queued"
    assert jobs.resume(job.id).status == "queued"
    assert jobs.pause(job.id).status == "paused"
    assert jobs.cancel(job.id).status == "cancelled"
    assert jobs.cancel(job.id).finished_at is not None
    for change in (jobs.pause, jobs.resume):
        with pytest.raises(openai.ConflictError):
            change(job.id)
    messages = [event.message for event in jobs.list_events(job.id, limit=4)][:4]
    assert messages == [
        "The job was cancelled",
        "The job was paused before it began",
        "The job was resumed",
        "The job was paused before it began",
    ]
    changes = ("created", "paused", "resumed", "ended")
    assert {entry["action"] for entry in trail(site, job)} >= {
        f"training_run.{change}" for change in changes
    }


def trail(site: Site, job: FineTuningJob) -> list[dict[str, Any]]:
    ours: dict[str, Any] = job.lorikeet  # type: ignore[attr-defined]
    with site.database() as connection:
        rows = connection.execute(
            "select action, actor_type from audit_auditevent where resource_id = %s",
            (ours["training_run"],),
        ).fetchall()
    return [{"action": action, "actor": actor} for action, actor in rows]


def test_an_idempotency_key_makes_one_job(site: Site) -> None:
    body = {"model": FAKE_NAME, "training_file": upload(site), "suffix": "once"}
    answers = [
        site.send("POST", JOBS, json=body, headers={"Idempotency-Key": "one"}) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["id"] == answers[1].json()["id"]
    assert answers[1].headers["Idempotent-Replayed"] == "true"


def test_events_come_as_they_happen_until_the_job_ends(site: Site) -> None:
    client, job = site.client(), create(site)
    seen: list[FineTuningJobEvent] = []

    def follow() -> None:
        stream = client.get(
            f"/fine_tuning/jobs/{job.id}/events",
            cast_to=FineTuningJobEvent,
            options={"params": {"stream": "true"}},
            stream=True,
            stream_cls=openai.Stream[FineTuningJobEvent],
        )
        seen.extend(stream)

    thread = threading.Thread(target=follow)
    thread.start()
    wait_for(lambda: site.send("GET", f"{JOBS}/{job.id}").status_code == 200)
    client.fine_tuning.jobs.pause(job.id)
    client.fine_tuning.jobs.cancel(job.id)
    thread.join(timeout=30)
    assert not thread.is_alive()
    listed = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    assert [event.id for event in seen] == [event.id for event in reversed(listed)]
    assert seen[-1].message == "The job was cancelled"
    # A client that lost the connection goes on after the last event that it has.
    rest = site.send(
        "GET", f"{JOBS}/{job.id}/events?stream=true", headers={"Last-Event-ID": seen[-2].id}
    )
    assert rest.headers["Content-Type"] == "text/event-stream"
    assert [line for line in rest.text.splitlines() if line.startswith("id: ")] == [
        f"id: {seen[-1].id}"
    ]
    assert rest.text.endswith("data: [DONE]\n\n")


def test_a_tenant_has_few_streams_of_events_at_a_time(site: Site) -> None:
    job = create(site)
    url = f"{site.url}{JOBS}/{job.id}/events?stream=true"
    headers = {"Authorization": f"Bearer {site.live.tenants['acme'].key}"}
    with httpx.Client(headers=headers) as http:
        opened = [http.send(http.build_request("GET", url), stream=True) for _ in range(10)]
        assert {answer.status_code for answer in opened} == {200}
        refusal = http.get(url)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "too_many_streams")
        for answer in opened:
            answer.close()

    def is_free() -> bool:
        with httpx.stream("GET", url, headers=headers) as answer:
            return answer.status_code == 200

    wait_for(is_free, what="a free place")


def test_another_tenants_jobs_events_and_files_do_not_exist(site: Site) -> None:
    job, file = create(site), upload(site)
    stranger = site.client("globex")
    assert job.id not in [other.id for other in stranger.fine_tuning.jobs.list()]
    jobs = stranger.fine_tuning.jobs
    for call in (jobs.retrieve, jobs.cancel, jobs.pause, jobs.resume, jobs.list_events):
        with pytest.raises(openai.NotFoundError):
            call(job.id)
    with pytest.raises(openai.NotFoundError):
        jobs.checkpoints.list(job.id)
    streamed = site.send("GET", f"{JOBS}/{job.id}/events?stream=true", "globex")
    assert streamed.status_code == 404
    for field in ("training_file", "validation_file"):
        body = {"training_file": upload(site, "globex"), field: file}
        with pytest.raises(openai.NotFoundError) as caught:
            jobs.create(model=FAKE_NAME, **body)
        assert caught.value.param == field
    # Not even an adapter of the other tenant is a model to begin from.
    with pytest.raises(openai.NotFoundError) as caught:
        jobs.create(
            model=f"{site.live.tenants['acme'].adapter}@1", training_file=upload(site, "globex")
        )
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_what_is_wrong_with_a_body_is_named(site: Site) -> None:
    file = upload(site)
    assert refused(site, 404)["param"] == "training_file"
    assert refused(site, 404, training_file="nonsense")["param"] == "training_file"
    wrong = refused(site, training_file=upload(site, purpose="user_data"))
    assert (wrong["param"], wrong["code"]) == ("training_file", "invalid_file_purpose")
    assert "user_data" in wrong["message"]
    assert refused(site, 404, training_file=file, model="gpt-4o")["param"] == "model"
    faults: dict[str, dict[str, Any]] = {
        "hyperparameters.n_epochs": {"hyperparameters": {"n_epochs": 0}},
        "hyperparameters.batch_size": {"hyperparameters": {"batch_size": 2.5}},
        "hyperparameters.learning_rate_multiplier": {
            "hyperparameters": {"learning_rate_multiplier": 1e9}
        },
        "method.supervised.hyperparameters.n_epochs": {
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": "many"}},
            }
        },
        "method.type": {"method": {"type": "reinforcement"}},
        "method.reinforcement.grader": {"method": {"type": "reinforcement", "reinforcement": {}}},
        "method.reinforcement.grader.type": rewarded({"type": "label_model"}),
        "method.reinforcement.grader.weight": rewarded(GRADER | {"weight": 1}),
        "method.reinforcement.grader.operation": rewarded(GRADER | {"operation": "regex"}),
        "method.reinforcement.grader.reference": rewarded(GRADER | {"reference": "{{ row.a }}"}),
        "method.reinforcement.grader.graders.a.input": rewarded(
            {"type": "multi", "graders": {"a": {**GRADER, "input": None}}, "calculate_output": "a"}
        ),
        "method.reinforcement.hyperparameters.reasoning_effort": rewarded(
            GRADER, reasoning_effort="high"
        ),
        "lorikeet.beta": {"lorikeet": {"beta": 0.1}},
        "lorikeet.samples": {"lorikeet": {"samples": 4}},
        "method.dpo": {"method": {"type": "supervised", "dpo": {}}},
        "method.supervised": {"method": {"type": "dpo", "supervised": {}}},
        "method.dpo.hyperparameters.beta": {
            "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}
        },
        "method.dpo.hyperparameters.gamma": {
            "method": {"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}
        },
        "method.supervised.hyperparameters.beta": {
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 0.1}}}
        },
        "lorikeet.method": {"lorikeet": {"method": "dpo"}},
        "integrations": {"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]},
        "lorikeet.rank": {"lorikeet": {"rank": 1000}},
        "lorikeet.target_modules.0": {"lorikeet": {"target_modules": ["../x"]}},
        "lorikeet.packing": {"lorikeet": {"packing": True}},
        "lorikeet.dropout": {"lorikeet": {"dropout": 0.1}},
        "lorikeet.quantization": {"lorikeet": {"quantization": "4bit"}},
        "suffix": {"suffix": "No Spaces!"},
        "seed": {"seed": -1},
        "metadata.key": {"metadata": {"key": "x" * 100_000}},
        "metadata": {"metadata": {f"key{number}": "x" for number in range(5000)}},
        "hyperparameters": {
            "hyperparameters": {"n_epochs": 1},
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 1}},
            },
        },
    }
    for param, body in faults.items():
        assert refused(site, training_file=file, **body)["param"] == param, body
    other = refused(site, training_file=file, method={"type": "magic"})
    assert other["param"] == "method.type"
    assert other["message"].endswith("supervised, dpo or reinforcement; `magic` is not known.")
    long = refused(site, training_file=file, lorikeet={"max_steps": 1_000_000})
    assert (long["param"], long["code"]) == ("lorikeet.max_steps", "training_too_long")
    with pytest.raises(openai.BadRequestError, match="line 2 is not JSON") as caught:
        upload(site, rows=ROWS.splitlines(keepends=True)[0] + b"{oh no\n")
    assert caught.value.code == "invalid_dataset"


PAIRS = b"".join(
    json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": f"hello {number}"}]},
            "preferred_output": [{"role": "assistant", "content": "world"}],
            "non_preferred_output": [{"role": "assistant", "content": "what?"}],
        }
    ).encode()
    + b"\n"
    for number in range(20)
)


GRADER = {
    "type": "string_check", "name": "total", "input": "{{ sample.output_text }}",
    "reference": "{{ item.total }}", "operation": "eq",
}  # fmt: skip
PROMPTS = b"".join(
    json.dumps(
        {"messages": [{"role": "user", "content": f"2 x {number}?"}], "total": str(2 * number)}
    ).encode()
    + b"\n"
    for number in range(20)
)


def rewarded(grader: Any, **hyperparameters: Any) -> dict[str, Any]:
    own = {"grader": grader, "hyperparameters": hyperparameters}
    return {"method": {"type": "reinforcement", "reinforcement": own}}


def test_a_job_by_reinforcement(site: Site) -> None:
    client, file = site.client(), upload(site, rows=PROMPTS)
    given = {"n_epochs": 2, "compute_multiplier": 0.5, "eval_interval": 3}
    body = rewarded(GRADER, **given)
    more: Any = {"extra_body": {"lorikeet": {"max_tokens": 32, "beta": 0.02}}}
    job = create(site, training_file=file, validation_file=file, suffix="sums", **body, **more)
    assert job.method is not None and job.method.reinforcement is not None
    told = job.method.reinforcement
    assert told.grader.to_dict() == GRADER and told.hyperparameters is not None
    rate = {"batch_size": 8, "learning_rate_multiplier": 1}
    assert told.hyperparameters.to_dict() == {**given, **rate}
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    ours: dict[str, Any] = job.lorikeet  # type: ignore[attr-defined]
    assert ours["hyperparameters"] == {
        **{"method": "reinforcement", "grader": GRADER, "samples": 4, "eval_steps": 3},
        **{"epochs": 2, "batch_size": 8, "max_tokens": 32, "beta": 0.02},
    }
    early = refused(site, training_file=file, **body)
    assert early["param"] == "method.reinforcement.hyperparameters.eval_interval"
    chats, body = upload(site), rewarded(GRADER)
    for field, rows, others, told_of in (
        ("training_file", chats, body, "has one answer: the method reinforcement takes prompts"),
        ("training_file", file, {}, "has no answer: train it with the method reinforcement"),
    ):
        error = refused(site, training_file=rows, **others)
        assert (error["param"], error["code"]) == (field, "rows_of_another_method")
        assert told_of in error["message"]


def test_a_job_of_preferences(site: Site) -> None:
    client, file = site.client(), upload(site, rows=PAIRS)
    hyperparameters = {"n_epochs": 2, "beta": 0.2, "learning_rate_multiplier": 0.5}
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    job = create(site, training_file=file, validation_file=file, suffix="kind", method=method)
    assert job.method is not None and job.method.type == "dpo" and job.method.dpo is not None
    told = job.method.dpo.hyperparameters
    assert told is not None and told.to_dict() == {**hyperparameters, "batch_size": 8}
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    ours: dict[str, Any] = job.lorikeet  # type: ignore[attr-defined]
    assert ours["hyperparameters"] == {
        **{"method": "dpo", "beta": 0.2, "epochs": 2, "batch_size": 8, "learning_rate": 0.00005}
    }
    auto = create(site, training_file=file, method={"type": "dpo"})
    assert auto.method is not None and auto.method.dpo is not None
    assert auto.method.dpo.hyperparameters is not None
    assert auto.method.dpo.hyperparameters.beta == 0.1
    # Rows of the other method are refused before a job is made.
    for field, one, other, body in (
        ("training_file", file, None, {}),
        ("training_file", upload(site), None, {"method": method}),
        ("validation_file", file, upload(site), {"method": method}),
    ):
        asked: dict[str, Any] = {"training_file": one, "validation_file": other, **body}
        error = refused(site, **asked)
        assert (error["param"], error["code"]) == (field, "rows_of_another_method")
    wrong = PAIRS.splitlines(keepends=True)[0].replace(b"preferred_output", b"preferred", 1)
    with pytest.raises(openai.BadRequestError, match="line 1: preferred is not a known key"):
        upload(site, rows=wrong)


def test_the_quota_of_runs_and_the_scopes_of_keys_hold(site: Site) -> None:
    file = upload(site)
    for _ in range(6):
        create(site, training_file=file)
    with pytest.raises(openai.RateLimitError) as caught:
        create(site, training_file=file)
    assert caught.value.code == "too_many_training_runs"
    code = (
        "import uuid\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "from controlplane.tenants import key_services\n"
        "from controlplane.tenants.key_rules import KeyRules\n"
        f"with tenant_scope(uuid.UUID('{site.live.tenants['acme'].id}')):\n"
        "    rules = KeyRules(scopes=('read', 'files:read'))\n"
        "    print(key_services.api_key_create(name='reader', rules=rules)[1])\n"
    )
    reader = site.client(api_key=site.run_python(code).strip()).fine_tuning.jobs
    job = reader.list().data[0]
    with pytest.raises(openai.PermissionDeniedError):
        reader.create(model=FAKE_NAME, training_file=file)
    for change in (reader.cancel, reader.pause, reader.resume):
        with pytest.raises(openai.PermissionDeniedError):
            change(job.id)
