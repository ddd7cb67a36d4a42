"""The operator's own pages: what they show, what they do once however often one clicks, to whom."""

from __future__ import annotations

import concurrent.futures
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.events.audit.models import AuditEvent
from controlplane.operator.pages import dead_letters as page_of_letters
from controlplane.queue.models import DeadLetter, Quarantine
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits.admit import NO_LIMITS
from tests.controlplane.conftest import Party, make_operator

WORKER = "pages-worker"
DIGEST = "ab" * 32
PAGES = ("index", "workers", "queues", "dead_letters", "quarantine")


@pytest.fixture
def operator(db: None) -> Client:
    client = Client()
    client.force_login(make_operator())
    return client


@pytest.fixture(autouse=True)
def pool(settings: Any) -> Iterator[Any]:
    """A pool of its own, whose keys are removed."""
    settings.POOL = "pages"
    client = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    yield client
    for key in client.keys("*{pages}*"):
        client.delete(key)
    client.close()


def beat(pool: Any, worker_id: str = WORKER, **fields: Any) -> None:
    heartbeat = protocol.Heartbeat(
        worker_id=worker_id,
        boot_id="b",
        pool=settings.POOL,
        base_model="tiny",
        base_revision="0" * 64,
        device="cuda:0",
        **fields,
    )
    pool.hset(protocol.worker_key(settings.POOL, worker_id), "m", heartbeat.encode())
    pool.zadd(protocol.workers_key(settings.POOL), {worker_id: pool.time()[0]})


def wait_in_queue(pool: Any, party: Party, number: int, *, is_batch: bool = False) -> None:
    """Admit requests as the gateway does."""
    from controlplane.usage.limits.admit import ADMIT, MAX_TENANT_WAITING, MAX_WAITING, admit_args

    tenant = str(party.tenant.id)
    for _ in range(number):
        name = f"req_{uuid.uuid4().hex}"
        job = job_of(party, name)
        letter = fair_queue.BATCH if is_batch else fair_queue.INTERACTIVE
        args = [
            *(settings.POOL, fair_queue.queue_key(settings.POOL, "tiny"), name, job.encode()),
            *(tenant, letter, "", time.time() + 60, 600, "", 3, 10, 10, 0, 60),
            *(MAX_WAITING, MAX_TENANT_WAITING),
            *admit_args(NO_LIMITS, settings.POOL, tenant),
        ]
        assert pool.eval(ADMIT, 1, protocol.job_key(settings.POOL, name), *args)[0] == b"ok"


def job_of(party: Party, request_id: str) -> protocol.GenerateJob:
    return protocol.GenerateJob(
        request_id=request_id,
        tenant_id=str(party.tenant.id),
        api_key_id="",
        gateway_id="",
        model="invoices",
        base_model="tiny",
        text="a planted secret",
    )


def letters_of(party: Party, base_model: BaseModel, number: int) -> list[DeadLetter]:
    with tenant_scope(party.tenant.id):
        adapter = Adapter.objects.create(name="invoices", base_model=base_model)
        version = AdapterVersion.objects.create(
            adapter=adapter, number=3, digest=DIGEST, status="ready"
        )
        return [
            DeadLetter.objects.create(
                request_id=f"req_{index:03}",
                model="invoices",
                adapter_version_id=version.pk,
                worker_id="gpu-7",
                reason="given up",
                job=job_of(party, f"req_{index:03}").to_dict(),
            )
            for index in range(number)
        ]


def actions(party: Party | None = None) -> list[str]:
    """What the audit trail of a tenant, or of the platform, says."""
    with all_tenants(reason="test"):
        events = AuditEvent.objects.filter(tenant=party.tenant if party else None)
        return list(events.order_by("seq").values_list("action", flat=True))


def shown(client: Client, name: str, query: str = "") -> str:
    answer = client.get(reverse(f"admin:{name}") + query)
    assert answer.status_code == 200
    return answer.content.decode()


def test_live_pool_shows_workers_by_base_model(
    operator: Client, base_model: BaseModel, pool: Any, acme: Party
) -> None:
    beat(pool, running=3, max_running=16, free_pages=40, num_pages=90, tokens_per_s=812.4)
    beat(pool, "other", loading=True)
    beat(pool, "ends", draining=True)
    beat(pool, "quiet")
    pool.zadd(protocol.workers_key(settings.POOL), {"quiet": pool.time()[0] - 600})
    wait_in_queue(pool, acme, 2)
    page = shown(operator, "workers")
    for text in ("3 / 16", "40 / 90", "812", "cuda:0", "1 ready", "3 of 4", "10 min ago"):
        assert text in page
    for state in ("ready", "loading", "draining", "silent"):
        assert f'<span class="ops-badge {state}">{state}</span>' in page
    assert "<dd>2 <small>20 tokens" in page
    assert page.count("Drain<span") == 2  # neither the draining one nor the silent one


def test_live_pool_shows_what_quantisation_changes(
    operator: Client, base_model: BaseModel, pool: Any
) -> None:
    settings.PRECISION_MAX_KL = 0.25
    figures = {"kl": 0.125, "agreement": 0.9, "logit_error": 2.0}
    beat(pool, precision={"weights": "fp8", "kv": "fp8", "kinds": {"all": figures}})
    beat(pool, "old")
    page = shown(operator, "workers")
    assert "<td>fp8, KV fp8 <small>KL 0.125 of 0.25</small>" in page
    assert '<meter min="0" max="0.25" value="0.125" aria-label="KL of the most">' in page


def test_live_part_is_a_part(operator: Client, base_model: BaseModel) -> None:
    for name in ("workers", "queues"):
        part = operator.get(reverse(f"admin:{name}"), headers={"HX-Request": "true"})
        assert part.content.decode().startswith('<div id="live" data-live hx-get=')
        assert "<html" not in part.content.decode()


def test_a_part_whose_session_ended_opens_the_sign_in(db: None) -> None:
    asked = {"HX-Request": "true"}
    part = Client().get(reverse("admin:workers"), headers=asked, follow=True)
    assert (part.status_code, part.headers["HX-Refresh"]) == (200, "true")
    assert part.content == b""


def test_a_base_model_without_a_worker_is_named(operator: Client, base_model: BaseModel) -> None:
    assert "No worker of the pool “pages” serves it" in shown(operator, "workers")
    assert "no worker for tiny" in shown(operator, "index")


def test_drain_asks_first_and_tells_once(operator: Client, pool: Any) -> None:
    beat(pool, running=1, max_running=4)
    url = reverse("admin:drain", args=[WORKER])
    orders = protocol.control_key(settings.POOL, WORKER)
    assert "up to 30 seconds" in operator.get(url).content.decode()
    assert pool.xlen(orders) == 0
    told = [operator.post(url, follow=True).content.decode() for _ in range(3)]
    assert f"{WORKER} was told to drain" in told[0]
    assert f"{WORKER} is draining already" in told[1]
    assert (pool.xlen(orders), actions()[1:]) == (1, ["worker.drained"])
    beat(pool, draining=True)
    pool.delete(orders)
    operator.post(url)
    assert pool.xlen(orders) == 0
    gone = operator.post(reverse("admin:drain", args=["nobody"]), follow=True)
    assert "There is no such worker." in gone.content.decode()


def test_queues_by_class_and_tenant(
    operator: Client, pool: Any, acme: Party, globex: Party
) -> None:
    wait_in_queue(pool, acme, 5)
    wait_in_queue(pool, globex, 1)
    wait_in_queue(pool, globex, 2, is_batch=True)
    for key in pool.keys(protocol.job_key(settings.POOL, "*")):
        if pool.hget(key, "class") == b"b":
            pool.hset(key, "since", time.time() - 300)
    page = shown(operator, "queues")
    assert page.index("tiny, interactive") < page.index(">acme<") < page.index(">globex<")
    assert "<dd>6</dd>" in page  # requests of the interactive class
    assert "<dd>60</dd>" in page  # their tokens
    assert "5 min" in page
    assert "a planted secret" not in page
    health = shown(operator, "index")
    assert "the oldest for 5 min" in health
    assert ">8<" in health


def test_queues_name_the_largest_twenty_only(operator: Client, pool: Any) -> None:
    queue = fair_queue.queue_key(settings.POOL, "tiny")
    pool.sadd(fair_queue.queues_key(settings.POOL), queue)
    for index in range(50):
        tenant = str(uuid.UUID(int=index))
        pool.zadd(f"{queue}:i", {tenant: 0})
        pool.rpush(f"{queue}:i:{tenant}", *[f"req_{index} 7 "] * (index + 1))
    with CaptureQueriesContext(connection) as caught:
        page = shown(operator, "queues")
    assert page.count('<th scope="row">') == 20
    assert "<dd>1,275</dd>" in page
    assert len(caught) < 10


def test_dead_letters_are_paged_without_prompts(
    operator: Client, base_model: BaseModel, acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_letters, "PAGE_SIZE", 2)
    letters = letters_of(acme, base_model, 5)
    with tenant_scope(acme.tenant.id):
        InferenceRequest.objects.create(
            request_id="req_004",
            model="invoices",
            base_model="tiny",
            worker_id="gpu-7",
            finish_reason="error",
            attempts=2,
            accepted_at=letters[0].created_at,
        )
    seen, query, num_queries = [], "", []
    for _ in range(3):
        with CaptureQueriesContext(connection) as caught:
            page = shown(operator, "dead_letters", query)
        num_queries.append(len(caught))
        assert "a planted secret" not in page
        seen += [one.request_id for one in letters if f">{one.request_id}<" in page][::-1]
        if "Newest</a>" not in page:
            assert '<td class="number">2</td>' in page
            assert "invoices@3" in page
        _, _, rest = page.partition('href="?before=')
        query = "?before=" + rest.partition('"')[0]
    assert seen == ["req_004", "req_003", "req_002", "req_001", "req_000"]
    assert max(num_queries) <= 9
    for slug in ("globex", "%00", "x" * 100):
        assert "No dead letter matches" in shown(operator, "dead_letters", f"?tenant={slug}")
    assert "req_004" in shown(operator, "dead_letters", "?tenant=acme&state=open")


def test_requeue_asks_first_and_runs_once(
    operator: Client, base_model: BaseModel, acme: Party, pool: Any
) -> None:
    one, two, _ = letters_of(acme, base_model, 3)
    url, form = reverse("admin:requeue"), {"letter": [str(one.pk), str(two.pk)]}
    asked = operator.get(url, form).content.decode()
    assert "these 2 dead letters" in asked
    assert "a planted secret" not in asked
    assert pool.keys(protocol.job_key(settings.POOL, "*")) == []
    first = operator.post(url, form, follow=True).content.decode()
    again = operator.post(url, form, follow=True).content.decode()
    assert first.count("is requeued as req_") == 2
    assert again.count("was requeued before, as req_") == 2
    assert len(pool.keys(protocol.job_key(settings.POOL, "*"))) == 2
    assert actions(acme).count("dead_letter.requeued") == 2
    assert "has not ended" in again
    assert "Choose at least one" in operator.get(url, follow=True).content.decode()
    assert operator.get(url, {"letter": "nonsense"}).status_code == 302


@pytest.mark.django_db(transaction=True)
def test_two_clicks_at_once_are_one(base_model: BaseModel, acme: Party, pool: Any) -> None:
    (letter,) = letters_of(acme, base_model, 1)
    clients = []
    for number in range(4):
        client = Client()
        client.force_login(make_operator(f"op{number}@example.com"))
        clients.append(client)

    def click(client: Client) -> int:
        try:
            return client.post(reverse("admin:requeue"), {"letter": str(letter.pk)}).status_code
        finally:
            connection.close()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(click, clients)) == [302] * 4
    assert actions(acme).count("dead_letter.requeued") == 1
    assert len(pool.keys(protocol.job_key(settings.POOL, "*"))) == 1


def test_a_refused_requeue_says_why_and_leaves_the_letter(
    operator: Client, base_model: BaseModel, acme: Party, pool: Any
) -> None:
    (letter,) = letters_of(acme, base_model, 1)
    with tenant_scope(acme.tenant.id):
        ref = protocol.AdapterRef(digest=DIGEST, config_key="c", tensors_key="t", num_bytes=1)
        job = {**(letter.job or {}), "adapters": [ref.to_dict()]}
        DeadLetter.objects.filter(pk=letter.pk).update(job=job)
    pool.hset(fair_queue.quarantine_key(settings.POOL), DIGEST, int(time.time()))
    answer = operator.post(reverse("admin:requeue"), {"letter": str(letter.pk)}, follow=True)
    assert "is not requeued. The queue refuses it: quarantined." in answer.content.decode()
    with tenant_scope(acme.tenant.id):
        row = DeadLetter.objects.get()
    assert (row.requeued_at, row.job is None) == (None, False)


def test_discard_deletes_letter_and_prompt_and_is_remembered(
    operator: Client, base_model: BaseModel, acme: Party
) -> None:
    one, two = letters_of(acme, base_model, 2)
    url, form = reverse("admin:discard"), {"letter": str(one.pk)}
    assert "this dead letter" in operator.get(url, form).content.decode()
    assert "is discarded." in operator.post(url, form, follow=True).content.decode()
    assert "discarded before" in operator.post(url, form, follow=True).content.decode()
    with tenant_scope(acme.tenant.id):
        assert [row.pk for row in DeadLetter.objects.all()] == [two.pk]
    assert actions(acme).count("dead_letter.discarded") == 1
    with all_tenants(reason="test"):
        event = AuditEvent.objects.get(action="dead_letter.discarded")
    assert event.actor_name == "op@example.com"
    assert event.before is not None
    assert event.before["request_id"] == "req_000"


def test_quarantine_says_whose_why_and_when_and_releases_once(
    operator: Client, base_model: BaseModel, acme: Party, pool: Any
) -> None:
    letters_of(acme, base_model, 2)
    key = fair_queue.quarantine_key(settings.POOL)
    pool.hset(key, DIGEST, 1_700_000_000)
    pool.hset(key, "cd" * 32, 1_700_000_001)
    page = shown(operator, "quarantine")
    for text in ("acme/invoices@3", "2023-11-14 22:13:20", "req_001", "given up, on gpu-7"):
        assert text in page
    assert "no known version" in page
    url = reverse("admin:release", args=[DIGEST])
    assert "acme/invoices@3" in operator.get(url).content.decode()
    assert pool.hexists(key, DIGEST)
    assert "is served again" in operator.post(url, follow=True).content.decode()
    assert "no longer quarantined" in operator.post(url, follow=True).content.decode()
    assert "no longer quarantined" in operator.get(url, follow=True).content.decode()
    assert (pool.hexists(key, DIGEST), actions()[1:]) == (False, ["quarantine.released"])
    assert not Quarantine.objects.filter(digest=DIGEST).exists()


def test_many_quarantined_adapters_are_paged(operator: Client, pool: Any) -> None:
    key = fair_queue.quarantine_key(settings.POOL)
    pool.hset(key, mapping={f"{index:064x}": 1_700_000_000 + index for index in range(120)})
    pages = []
    for number in (1, 2, 3):
        with CaptureQueriesContext(connection) as caught:
            pages.append(shown(operator, "quarantine", f"?page={number}"))
        assert len(caught) <= 8
    assert [page.count("Release<span") for page in pages] == [50, 50, 20]
    assert operator.get(reverse("admin:quarantine") + "?page=x").status_code == 302


def test_health_links_to_what_needs_care(
    operator: Client, base_model: BaseModel, acme: Party, pool: Any
) -> None:
    letters_of(acme, base_model, 3)
    pool.hset(fair_queue.quarantine_key(settings.POOL), DIGEST, 1_700_000_000)
    beat(pool)
    page = shown(operator, "index")
    for name in ("workers", "queues", "quarantine", "training_trainingrun_changelist"):
        assert f'href="{reverse(f"admin:{name}")}"' in page
    assert (
        f'<a href="{reverse("admin:dead_letters")}?state=open">Dead letters</a><strong>3<' in page
    )
    assert "1 of 1" in page
    assert "every base model served" in page


def test_pages_open_without_redis(operator: Client, settings: Any, base_model: BaseModel) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    for name in ("index", "workers", "queues", "quarantine"):
        assert "The queue does not answer." in shown(operator, name)
    answer = operator.post(reverse("admin:drain", args=[WORKER]), follow=True)
    assert "The queue does not answer." in answer.content.decode()


ACTIONS: tuple[tuple[str, list[str]], ...] = (
    ("drain", [WORKER]),
    ("resume", [WORKER]),
    ("requeue", []),
    ("discard", []),
    ("release", [DIGEST]),
)


@pytest.mark.parametrize(("name", "args"), ACTIONS, ids=[name for name, _ in ACTIONS])
def test_an_action_needs_the_csrf_token_and_an_operator(
    name: str, args: list[str], acme: Party, base_model: BaseModel, pool: Any
) -> None:
    beat(pool, draining=name == "resume")
    (letter,) = letters_of(acme, base_model, 1)
    pool.hset(fair_queue.quarantine_key(settings.POOL), DIGEST, 1_700_000_000)
    url, form = reverse(f"admin:{name}", args=args), {"letter": str(letter.pk)}
    theirs, nobody, forged = Client(), Client(), Client(enforce_csrf_checks=True)
    theirs.force_login(acme.owner)
    forged.force_login(make_operator())
    assert theirs.post(url, form, follow=True).status_code == 403
    assert nobody.post(url, form).headers["Location"].startswith("/admin/login/?next=")
    assert forged.post(url, form).status_code == 403
    assert forged.delete(url).status_code in (403, 405)
    assert pool.xlen(protocol.control_key(settings.POOL, WORKER)) == 0
    assert pool.hexists(fair_queue.quarantine_key(settings.POOL), DIGEST)
    with tenant_scope(acme.tenant.id):
        assert DeadLetter.objects.get().requeued_at is None


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_an_operator(name: str, acme: Party) -> None:
    client = Client()
    client.force_login(acme.owner)
    assert client.get(reverse(f"admin:{name}"), follow=True).status_code == 403
