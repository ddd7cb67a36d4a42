"""/v1/batches through the official client: a whole life, and every way in which one goes wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.controlplane.files.batches.conftest import ENDPOINT, Batches, chat_line
from tests.controlplane.gateway.files.test_files import objects, sweep
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for


@pytest.fixture(scope="module", autouse=True)
def runner(pool: LiveStack) -> Iterator[None]:
    worker = pool.start_worker("batches-worker", step_s=0.002)
    process = pool.start_batch_runner()
    yield
    for each in (process, worker):
        assert each.stop() == 0, each.log.read_text()


def test_a_batch_from_its_file_to_its_output(batches: Batches) -> None:
    texts = {f"task-{i}": f"text {i} 🦜" for i in range(100)}
    before = int(time.time())
    batch = batches.create(
        [chat_line(custom_id, text) for custom_id, text in texts.items()],
        metadata={"night": "1"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert re.fullmatch(r"batch_[0-9a-f]{32}", batch.id)
    assert (batch.object, batch.endpoint, batch.status) == ("batch", ENDPOINT, "validating")
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = batches.ended(batch)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert (done.metadata, done.model, done.errors) == ({"night": "1"}, FAKE_NAME, None)
    moments = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert moments == sorted(moments) and before - 2 <= moments[0]
    assert done.failed_at is done.cancelled_at is done.error_file_id is None

    lines = batches.lines(done.output_file_id)
    assert {line["custom_id"] for line in lines} == set(texts) and len(lines) == 100
    total = 0
    for line in lines:
        assert re.fullmatch(r"batch_req_[0-9a-f]{32}", line["id"])
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        answer = ChatCompletion.model_validate(line["response"]["body"])
        assert answer.choices[0].message.content == texts[line["custom_id"]]
        assert line["response"]["request_id"].startswith("req_")
        assert answer.usage is not None
        total += answer.usage.total_tokens
    assert len({line["response"]["request_id"] for line in lines}) == 100
    assert done.usage is not None and done.usage.total_tokens == total
    file = batches.site.client().files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at == file.created_at + 7200
    with batches.site.database() as database:
        assert database.execute("select count(*) from batches_batchresult").fetchone() == (0,)


def test_completions_and_adapters(batches: Batches) -> None:
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": f"prompt {i}", "max_tokens": 100},
        }
        for i, model in enumerate((FAKE_NAME, "acme-adapter"))
    ]
    done = batches.ended(batches.create(lines, endpoint="/v1/completions"))
    assert (done.status, done.model) == ("completed", None)
    found = {line["custom_id"]: line["response"] for line in batches.lines(done.output_file_id)}
    assert found["c1"]["body"]["model"] == "acme-adapter"
    assert found["c0"]["body"]["choices"][0]["text"] == "prompt 0"


def response_line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": FAKE_NAME, "input": f"text of {custom_id} 🦜", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}


def test_responses(batches: Batches) -> None:
    said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    lines = [
        response_line("plain", instructions="Be brief.", metadata={"k": "v"}),
        response_line("items", input=said, max_output_tokens=500),
        response_line("cut", max_output_tokens=1),
        response_line("streamed", stream=True),
        response_line("kept", previous_response_id="resp_1"),
        response_line("grammar", text={"format": {"type": "json_schema", "name": "x"}}),
        response_line("long", input="long " * 600),
        response_line("misfit", model="acme-misfit"),
    ]
    done = batches.ended(batches.create(lines, endpoint="/v1/responses"))
    assert (done.status, done.endpoint) == ("completed", "/v1/responses")
    assert done.request_counts.model_dump() == {"total": 8, "completed": 3, "failed": 5}
    found = {line["custom_id"]: line["response"] for line in batches.lines(done.output_file_id)}
    answers = {name: Response.model_validate(each["body"]) for name, each in found.items()}
    for name, answer in answers.items():
        assert answer.id == f"resp_{found[name]['request_id'].removeprefix('req_')}"
    assert answers["plain"].status == answers["items"].status == "completed"
    assert "text of plain 🦜" in answers["plain"].output_text
    assert answers["plain"].metadata == {"k": "v"} and answers["plain"].instructions == "Be brief."
    assert answers["cut"].status == "incomplete"
    usages = [answer.usage for answer in answers.values()]
    assert done.usage is not None
    assert done.usage.input_tokens == sum(usage.input_tokens for usage in usages if usage)
    assert done.usage.output_tokens == sum(usage.output_tokens for usage in usages if usage) > 0
    errors = {line["custom_id"]: line["response"] for line in batches.lines(done.error_file_id)}
    assert {i: (e["status_code"], e["body"]["error"]["param"]) for i, e in errors.items()} == {
        "streamed": (400, "stream"),
        "kept": (400, "previous_response_id"),
        "grammar": (400, "text.format.schema"),
        "long": (400, "input"),
        "misfit": (409, "model"),
    }


def test_what_the_live_api_would_refuse_is_an_error_of_its_line(batches: Batches) -> None:
    bodies: dict[str, Any] = {
        "good": {},
        "hot": {"temperature": 5},
        "typo": {"temprature": 1},
        "streamed": {"stream": True},
        "misfit": {"model": "acme-misfit"},
        "long": {"max_tokens": 10, "messages": [{"role": "user", "content": "long " * 600}]},
    }
    done = batches.ended(batches.create([chat_line(i, **body) for i, body in bodies.items()]))
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 6, "completed": 1, "failed": 5}
    assert [line["custom_id"] for line in batches.lines(done.output_file_id)] == ["good"]
    errors = {line["custom_id"]: line["response"] for line in batches.lines(done.error_file_id)}
    found = {i: (e["status_code"], e["body"]["error"]["param"]) for i, e in errors.items()}
    assert found == {
        "hot": (400, "temperature"),
        "typo": (400, "temprature"),
        "streamed": (400, "stream"),
        "misfit": (409, "model"),
        "long": (400, "messages"),
    }


def test_a_file_that_is_no_batch_fails_with_its_lines(batches: Batches) -> None:
    lines: list[Any] = [
        chat_line("a"),
        b"{broken",
        chat_line("a"),
        {**chat_line("b"), "url": "/v1/completions"},
        {**chat_line("c"), "method": "GET"},
        chat_line("d", model="globex-adapter"),
        chat_line("e", model="nothing"),
        {"custom_id": "f", "method": "POST", "url": ENDPOINT, "body": {"messages": []}},
        {key: value for key, value in chat_line("g").items() if key != "custom_id"},
        {**chat_line("h"), "body": "text"},
        b"[" * 100_000,
        b"\xff\xfe",
        chat_line("zero \x00 \ud800", model="\x00"),
    ]
    done = batches.ended(batches.create(lines))
    assert done.status == "failed" and done.failed_at is not None
    assert done.output_file_id is done.error_file_id is None
    assert done.errors is not None and done.errors.data is not None
    found = [(error.line, error.code, error.param) for error in done.errors.data]
    assert found[:10] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "invalid_method", "method"),
        (6, "model_not_found", "body.model"),
        (7, "model_not_found", "body.model"),
        (8, "missing_required_parameter", "body.model"),
        (9, "missing_required_parameter", "custom_id"),
        (10, "invalid_body", "body"),
        (11, "invalid_json_line", None),
    ]
    assert [line for line, _, _ in found[10:]] == [12, 13]
    # Another tenant's model and none at all are one answer.
    theirs, missing = done.errors.data[4].message, done.errors.data[5].message
    assert theirs is not None and missing is not None
    assert theirs.replace("globex-adapter", "nothing") == missing


def test_an_empty_file_and_too_many_lines(batches: Batches) -> None:
    empty = batches.ended(batches.create([b"", b"  "]))
    assert empty.status == "failed" and empty.errors.data[0].code == "empty_file"
    many = batches.ended(batches.create([chat_line(str(i)) for i in range(50_001)]))
    assert many.status == "failed"
    assert [(e.line, e.code) for e in many.errors.data] == [(50_001, "too_many_lines")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "\0"}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_a_batch_that_is_asked_for_wrongly(
    batches: Batches, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        batches.create([chat_line("a")], **fields)
    assert str(refused.value.param).startswith(param)


def test_the_input_is_a_file_for_batches_of_ones_own(batches: Batches) -> None:
    ours, theirs = batches.site.client(), batches.site.client("globex")
    words = ours.files.create(file=b"words", purpose="user_data").id
    foreign = theirs.files.create(file=b"{}", purpose="batch").id
    for file_id, kind in (
        (words, openai.BadRequestError),
        (foreign, openai.NotFoundError),
        (f"file-{'0' * 32}", openai.NotFoundError),
    ):
        with pytest.raises(kind) as refused:
            ours.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        assert refused.value.param == "input_file_id"  # type: ignore[attr-defined]


def test_a_batch_that_is_asked_for_twice_is_made_once(batches: Batches) -> None:
    """As a script does that did not hear the answer, with a key of its making."""
    file = batches.site.client().files.create(file=("x", b"no batch"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}

    def ask(**changes: Any) -> Any:
        headers = {"Idempotency-Key": file.id}
        return batches.site.send("POST", "/v1/batches", json={**body, **changes}, headers=headers)

    refused = ask(endpoint="/v1/nothing")
    first, second = ask(), ask()
    assert (refused.status_code, first.status_code, second.status_code) == (400, 200, 200)
    assert first.json() == second.json()
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert ask(metadata={"a": "b"}).json()["error"]["code"] == "idempotency_key_reused"
    with batches.site.database() as database:
        made = database.execute(
            "select count(*) from batches_batch where input_file_id = %s",
            (file.id.removeprefix("file-"),),
        ).fetchone()
    assert made == (1,)


def test_a_list_of_batches_page_by_page(batches: Batches) -> None:
    made = [batches.create([b"no batch"], tenant="globex") for _ in range(3)]
    client = batches.site.client("globex")
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:3] == [batch.id for batch in made][::-1]
    assert client.batches.list(after=made[1].id).data[0].id == made[0].id


def test_anothers_batch_and_no_batch_are_one_answer(batches: Batches) -> None:
    batch = batches.create([b"no batch"])
    missing = f"batch_{'0' * 32}"
    for method, path in (("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel")):
        theirs = batches.site.send(method, path.format(batch.id), "globex")
        none = batches.site.send(method, path.format(missing), "globex")
        assert (theirs.status_code, none.status_code) == (404, 404)
        assert theirs.content == none.content
    found = batches.site.send("GET", f"/v1/batches?after={batch.id}", "globex").json()["data"]
    assert batch.id not in [each["id"] for each in found]
    done = batches.ended(batch)
    for method, path in (("GET", "/v1/files/{}"), ("GET", "/v1/files/{}/content")):
        answer = batches.site.send(method, path.format(done.input_file_id), "globex")
        assert answer.status_code == 404


def slow_lines(num: int) -> list[Any]:
    """Each takes about a second: the engine's step is 2 ms."""
    return [chat_line(f"slow-{i}", max_tokens=450, ignore_eos=True) for i in range(num)]


def begun(batches: Batches, batch: Any, num: int = 1) -> Any:
    """The batch once some of its lines are answered."""

    def look() -> Any:
        now = batches.site.client().batches.retrieve(batch.id)
        assert now.status in ("validating", "in_progress")
        return now if now.request_counts.completed >= num else None

    return wait_for(look, timeout_s=60, what="the first answers")


def all_lines(batches: Batches, done: Any) -> list[dict[str, Any]]:
    return batches.lines(done.output_file_id) + batches.lines(done.error_file_id)


def test_a_cancelled_batch_keeps_what_was_answered(batches: Batches) -> None:
    batch = batches.create([chat_line(f"fast-{i}") for i in range(20)] + slow_lines(400))
    begun(batches, batch, 20)
    cancelling = batches.site.client().batches.cancel(batch.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
    done = batches.ended(batch)
    assert done.status == "cancelled" and done.cancelled_at is not None
    lines = all_lines(batches, done)
    assert len(lines) == len({line["custom_id"] for line in lines}) == 420
    assert done.request_counts.completed == len(batches.lines(done.output_file_id)) >= 20
    unanswered = [line for line in batches.lines(done.error_file_id) if line["error"]]
    assert {line["error"]["code"] for line in unanswered} == {"batch_cancelled"}
    assert batches.site.client().batches.cancel(batch.id).status == "cancelled"
    finished = batches.ended(batches.create([chat_line("a")]))
    with pytest.raises(openai.ConflictError):
        batches.site.client().batches.cancel(finished.id)


def test_a_batch_whose_window_is_over_expires_with_what_there_is(batches: Batches) -> None:
    batch = batches.create([chat_line(f"fast-{i}") for i in range(20)] + slow_lines(400))
    begun(batches, batch, 20)
    batches.set(batch, "expires_at = now()")
    done = batches.ended(batch)
    assert done.status == "expired" and done.expired_at is not None
    lines = all_lines(batches, done)
    assert len(lines) == len({line["custom_id"] for line in lines}) == 420
    assert len(batches.lines(done.output_file_id)) == done.request_counts.completed >= 20
    codes = {line["error"]["code"] for line in batches.lines(done.error_file_id)}
    assert codes == {"batch_expired"}


def test_a_batch_ends_with_its_key(batches: Batches) -> None:
    live = batches.site.live
    code = (
        "import uuid\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        "from controlplane.tenants import services\n"
        f"with tenant_scope(uuid.UUID('{live.tenants['acme'].id}')):\n"
        "    print(services.api_key_create(name='for a batch')[1])\n"
    )
    key = batches.site.run_python(code).strip()
    client = batches.site.client(api_key=key)
    file = client.files.create(file=batches_file(slow_lines(400)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    begun(batches, batch, 0)
    public_id = key.split("_")[2][:22]
    with batches.site.database() as database:
        database.execute(
            "update tenants_apikey set revoked_at = now() where public_id = %s", (public_id,)
        )
    done = batches.ended(batch)
    assert done.status == "failed"
    assert done.errors.data[0].code == "api_key_ended"
    assert len(all_lines(batches, done)) in (0, 400)  # it may have been before the first line


def batches_file(lines: list[Any]) -> tuple[str, bytes]:
    from tests.controlplane.files.batches.conftest import as_file

    return "in.jsonl", as_file(lines)


def test_a_deleted_input_file_ends_its_batch(batches: Batches) -> None:
    batch = batches.create(slow_lines(1000))
    batches.site.client().files.delete(batch.input_file_id)
    done = batches.ended(batch)
    assert done.status == "failed"
    assert done.errors.data[0].code == "input_file_gone"


def test_an_input_file_that_expires_is_kept_for_its_batch(batches: Batches) -> None:
    batch = batches.create(slow_lines(200))
    pk = batch.input_file_id.removeprefix("file-")
    with batches.site.database() as database:
        database.execute("update files_file set expires_at = now() where id = %s", (pk,))
    sweep(batches.site)
    assert any(pk in key for key in objects(batches.site, "acme"))
    done = batches.ended(batch)
    assert (done.status, done.request_counts.completed) == ("completed", 200)
    sweep(batches.site)
    assert not any(pk in key for key in objects(batches.site, "acme"))


def test_a_limit_is_waited_for_and_a_budget_too(batches: Batches) -> None:
    """Two requests at a time, then no tokens at all for a while: no line fails of it."""
    live = batches.site.live
    scope = (
        "import uuid\n"
        "from controlplane.usage.limits import services\n"
        "from controlplane.tenancy.scoping import tenant_scope\n"
        f"with tenant_scope(uuid.UUID('{live.tenants['globex'].id}')):\n"
    )
    batches.site.run_python(
        f"{scope}    services.rate_limit_set(max_concurrent=2)\n"
        "    services.budget_set(hard_limit=1)\n"
    )
    batch = batches.create([chat_line(f"n{i}") for i in range(6)], tenant="globex")
    client = batches.site.client("globex")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", timeout_s=30)
    time.sleep(3)
    assert client.batches.retrieve(batch.id).request_counts.completed == 0
    batches.site.run_python(f"{scope}    services.limit_remove(services.Budget.objects.get())\n")
    done = batches.ended(batch, "globex", timeout_s=90)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
    batches.site.run_python(f"{scope}    services.limit_remove(services.RateLimit.objects.get())\n")
