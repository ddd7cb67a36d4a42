"""Training clients' calls with a real trainer, database, queue and object store."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from django.db import connection
from django.utils import timezone

from contract.training.calls import PassRows
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.errors import InvalidRequest, NotFound, RateLimited
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_CLIENT_STATES
from controlplane.tenancy.scoping import new_id, tenant_scope
from controlplane.training.models import Dataset
from controlplane.training.primitives import calls, services, states, tasks, trainer
from controlplane.training.primitives.models import ClientState, TrainingClient
from controlplane.training.runs import services as run_services
from controlplane.usage.limits import quotas
from controlplane.usage.models import TrainingUsage
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST

pytestmark = pytest.mark.django_db(transaction=True)
SESSION = "tks-" + "0" * 32
ADAM = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "max_norm": 0.0,
}
LOAD = {"optimizer": True}


@pytest.fixture(autouse=True)
def no_messages(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests start trainers themselves; idle ones end soon."""
    monkeypatch.setattr(services, "trainer_want", lambda client: None)
    monkeypatch.setattr(trainer, "LINGER_S", 0.2)
    monkeypatch.setattr(trainer, "IDLE_S", 0.5)
    monkeypatch.setattr(calls, "LEASE_S", 6)


def make_client(number: int = 0, **changes: Any) -> TrainingClient:
    said = {"adapter": "by-calls", "rank": 4, "seed": 1, "train_attn": True, "train_mlp": True}
    return services.client_create(
        model_id=f"{SESSION}:train:{number}", base_model="tiny-llama", **{**said, **changes}
    )


def send(client: TrainingClient, number: int, kind: str, said: Any = None) -> str:
    body = b""
    if kind in ("forward", "forward_backward"):
        ids = array("i", range(3, 15))
        rows = PassRows(
            loss="cross_entropy",
            low=0.8,
            high=1.2,
            is_forward=kind == "forward",
            lengths=[7, 5],
            token_ids=ids,
            targets=array("i", [*ids[1:], 2]),
            weights=array("f", [1.0] * 12),
            sampled=array("f", bytes(48)),
        )
        body, said = rows.encode(), {"lengths": [7, 5]}
    return services.call_send(client, number, kind, said or {}, body)


def train(client: TrainingClient, first: int, steps: int) -> list[str]:
    sent = []
    for number in range(first, first + 2 * steps, 2):
        sent.append(send(client, number, "forward_backward"))
        send(client, number + 1, "optim_step", ADAM)
    return sent


def run_trainer(client: TrainingClient) -> None:
    """Do what waits, and end."""
    tasks.clients_train(str(client.base_model_id))


def said(client: TrainingClient, call_id: str) -> dict[str, Any]:
    found = calls.find(client.tenant_id, call_id)
    assert found is not None
    assert found[1] is not None, f"no result of {call_id}"
    return found[1].said


def loss(client: TrainingClient, call_id: str) -> float:
    told = said(client, call_id)
    assert "error" not in told, told
    return float(told["metrics"]["loss:sum"])


@pytest.fixture
def beside() -> Iterator[Callable[[TrainingClient], None]]:
    """Runs a trainer in a thread, which ends with the test."""
    threads = []

    def begin(client: TrainingClient) -> None:
        def run() -> None:
            try:
                run_trainer(client)
            finally:
                connection.close()

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def is_done(client: TrainingClient, call_id: str) -> bool:
    found = calls.find(client.tenant_id, call_id)
    return found is not None and found[1] is not None


def test_an_idle_client_leaves_the_memory_and_comes_back_as_it_was(in_acme: Party) -> None:
    """Two trainers, one after the other, do what one would; the state is counted and moves."""
    moved, kept = make_client(0), make_client(1, adapter="kept")
    first = train(moved, 1, 2)
    forward = send(moved, 5, "forward_backward")  # its gradient moves, too
    run_trainer(moved)
    moved.refresh_from_db()
    assert (moved.trainer, moved.is_lost) == ("", False)
    assert storage.object_size(moved.state_key) == moved.state_bytes == states.storage_used()
    assert quotas.used("storage_bytes") == moved.state_bytes
    before = moved.state_key
    send(moved, 6, "optim_step", ADAM)
    last = send(moved, 7, "forward")
    whole = train(kept, 1, 3)
    end = send(kept, 7, "forward")
    run_trainer(moved)
    assert [loss(moved, each) for each in (*first, forward, last)] == [
        loss(kept, each) for each in (*whole, end)
    ]
    assert loss(moved, last) < loss(moved, first[0])
    moved.refresh_from_db()
    assert moved.state_key != before
    assert storage.object_size(before) is None
    used = TrainingUsage.objects.filter(run_id=moved.pk)
    assert sum(used.values_list("trained_tokens", flat=True)) == 4 * 12
    assert {(row.adapter, row.base_model) for row in used} == {("by-calls", "tiny-llama")}


def test_a_killed_trainer_loses_no_saved_state_and_says_what_is_lost(
    in_acme: Party, beside: Callable[[TrainingClient], None]
) -> None:
    client, idle = make_client(0), make_client(1, adapter="idle")
    train(client, 1, 1)
    saved = send(client, 3, "save", {"name": "a", "overwrite": False, "ttl_seconds": None})
    at_save = send(client, 4, "forward")
    lost = train(client, 5, 1)[0]
    opened = send(idle, 0, "create")
    beside(client)
    wait_for(lambda: is_done(client, f"{client.model_id}:6") and is_done(idle, opened))
    assert said(client, saved)["path"] == f"tinker://{client.model_id}/weights/a"
    kill_child()
    wait_for(lambda: is_free(client))
    assert loss(client, lost)  # it was done, and its state is gone
    after = send(client, 7, "forward")
    unharmed = send(idle, 1, "forward")
    run_trainer(client)
    told = said(client, after)
    assert (told["error"], told["category"]) == (trainer.LOST, "server")
    assert loss(idle, unharmed)  # it had trained nothing
    again = send(client, 8, "forward")
    state = ClientState.objects.get()
    loaded = send(client, 9, "load", {"state": str(state.pk), **LOAD})
    back = send(client, 10, "forward")
    run_trainer(client)
    assert said(client, again)["error"] == trainer.LOST
    assert said(client, loaded)["path"] == state.path
    assert loss(client, back) == loss(client, at_save)
    client.refresh_from_db()
    assert (client.is_lost, client.trainer) == (False, "")


def kill_child() -> None:
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "worker.primitives" in (process.info["cmdline"] or [])
        and any(parent.pid == os.getpid() for parent in process.parents())
    ]
    assert found
    for process in found:
        process.send_signal(signal.SIGKILL)


def is_free(client: TrainingClient) -> bool:
    """Return whether no trainer has the client's base."""
    boot = uuid.uuid4().hex
    if not calls.lease_take(client.base_model_id, boot):
        return False
    calls.lease_drop(client.base_model_id, boot)
    return True


def test_more_clients_than_have_room_take_turns_in_the_memory(
    in_acme: Party,
    monkeypatch: pytest.MonkeyPatch,
    beside: Callable[[TrainingClient], None],
) -> None:
    """Eight of rank 256 have the room of 64 of rank 32; the one idle the longest leaves."""
    monkeypatch.setattr(trainer, "IDLE_S", 1e9)
    stored = TRAINING_CLIENT_STATES.labels("stored")._value.get()
    clients = [make_client(number, rank=256, adapter=f"a-{number}") for number in range(11)]
    firsts = [train(client, 1, 1)[0] for client in clients]
    lasts = [send(client, 3, "forward") for client in clients]
    beside(clients[0])
    for client, last in zip(clients, lasts, strict=True):
        wait_for(functools.partial(is_done, client, last))
    moved = TRAINING_CLIENT_STATES.labels("stored")._value.get() - stored
    assert moved >= 3
    monkeypatch.setattr(trainer, "IDLE_S", 0.0)
    wait_for(lambda: is_free(clients[0]))
    for client, first, last in zip(clients, firsts, lasts, strict=True):
        assert loss(client, last) < loss(client, first)
        client.refresh_from_db()
        assert client.state_key


def test_a_trainer_leaves_the_device_to_runs_that_wait(
    adapter: Adapter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LINGER_S", "IDLE_S"):
        monkeypatch.setattr(trainer, name, 1e9)
    monkeypatch.setattr(tasks, "send_waiting", lambda: None)
    monkeypatch.setattr(trainer, "TURN_S", 0.0)
    client = make_client(0)
    train(client, 1, 1)
    run_services.training_run_create(
        adapter_name="greeter", dataset_name="chats", hyperparameters=FAST
    )
    run_trainer(client)
    client.refresh_from_db()
    assert client.state_key
    assert is_free(client)


def test_tenants_find_nothing_of_each_other(in_acme: Party, globex: Party) -> None:
    """Not a client, a call, a state or a path, under names that both have."""
    ours = make_client(0)
    train(ours, 1, 1)
    send(ours, 3, "save", {"name": "a", "overwrite": False, "ttl_seconds": None})
    run_trainer(ours)
    path = ClientState.objects.get().path
    with tenant_scope(globex.tenant.id):
        with pytest.raises(NotFound):
            services.client_get(ours.model_id)
        with pytest.raises(NotFound):
            services.state_get(path, ClientState.Kind.WEIGHTS)
        assert calls.find(globex.tenant.id, f"{ours.model_id}:1") is None
        theirs = make_client(0)
        assert theirs.model_id == ours.model_id
        foreign = ClientState.objects.filter(pk__isnull=False).first()
        assert foreign is None
        fresh = send(theirs, 1, "forward")
        state = send(theirs, 2, "load", {"state": state_id(in_acme), **LOAD})
    mine = send(ours, 4, "forward")
    with tenant_scope(globex.tenant.id):
        run_trainer(theirs)
        assert said(theirs, state)["error"] == "There is no such state."
        untrained = loss(theirs, fresh)
    assert loss(ours, mine) < untrained


def state_id(party: Party) -> str:
    with tenant_scope(party.tenant.id):
        return str(ClientState.objects.get().pk)


def test_samplers_weights_are_a_version_and_wrong_calls_are_told(in_acme: Party) -> None:
    client = make_client(0)
    train(client, 1, 1)
    named = send(client, 3, "sampler", {"name": "s", "session": "x", "ttl_seconds": None})
    unnamed = send(client, 4, "sampler", {"name": None, "session": "x", "ttl_seconds": None})
    save = {"name": "a", "overwrite": False, "ttl_seconds": 3600}
    send(client, 5, "save", save)
    twice = send(client, 6, "save", save)
    over = send(client, 7, "save", save | {"overwrite": True})
    other = make_client(1, rank=8, adapter="other")
    run_trainer(client)
    assert said(client, named) == {"path": f"tinker://{client.model_id}/sampler_weights/s"}
    assert said(client, unnamed) == {"sampling_session_id": "x:by-calls@2"}
    versions = AdapterVersion.objects.order_by("number").values_list("status", "source")
    assert list(versions) == [("ready", "training"), ("ready", "checkpoint")]
    assert "There is a state a already" in said(client, twice)["error"]
    assert said(client, twice)["category"] == "user"
    assert "path" in said(client, over)
    state = ClientState.objects.get(kind="weights")
    wrong = send(other, 1, "load", {"state": str(state.pk), **LOAD})
    run_trainer(client)
    assert "another rank" in said(other, wrong)["error"]
    # Its time is over: the file goes, and a client that nobody used for long loses its place.
    ClientState.objects.update(expires_at="2020-01-01T00:00Z")
    TrainingClient.objects.update(used_at="2020-01-01T00:00Z")
    client.refresh_from_db()
    orphan, young = (
        f"{states._prefix(client.tenant_id)}{client.pk}/{each}.safetensors"
        for each in ("01900000-0000-7000-8000-000000000000", new_id())
    )
    for key in (orphan, young):
        storage.put_bytes(key, b"x")
    TrainingClient.objects.filter(pk=other.pk).update(used_at=timezone.now())
    states.sweep()
    assert storage.object_size(orphan) is None
    assert storage.object_size(young) == 1
    assert not ClientState.objects.exists()
    assert storage.object_size(state.key) is storage.object_size(client.state_key) is None
    client.refresh_from_db()
    assert (client.is_lost, client.state_key, states.storage_used()) == (True, "", 0)


def test_what_waits_is_bounded_and_sent_twice_is_done_once(
    in_acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(0)
    assert send(client, 1, "optim_step", ADAM) == send(client, 1, "optim_step", ADAM)
    assert len(calls.waiting(client.base_model_id)) == 1
    monkeypatch.setattr(calls, "MAX_PENDING", 3)
    send(client, 2, "forward")
    send(client, 3, "forward")
    with pytest.raises(RateLimited, match="wait for the trainer"):
        send(client, 4, "forward")
    with tenant_scope(globex.tenant.id):
        send(make_client(0), 1, "forward")
    run_trainer(client)
    assert loss(client, send(client, 3, "forward"))  # it was done: its result is there already
    monkeypatch.setattr(quotas, "allowed", lambda name: 0)
    with pytest.raises(RateLimited) as refused:
        send(client, 9, "forward")
    assert refused.value.code == "device_seconds_used_up"
    monkeypatch.setattr(services, "MAX_CLIENTS", 1)
    with pytest.raises(RateLimited, match="1 training clients"):
        make_client(5)
    for changes in ({"rank": 0}, {"train_attn": False, "train_mlp": False}, {"adapter": "A b"}):
        with pytest.raises(InvalidRequest):
            make_client(6, **changes)


def test_results_that_nobody_fetches_are_bounded(
    acme: Party, globex: Party, tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(calls, "FETCHED_S", 1)
    tenant = acme.tenant.pk

    def call(number: int) -> calls.Call:
        ids = {"tenant_id": tenant, "base_id": tiny_base.pk, "client_id": uuid.UUID(int=1)}
        return calls.Call(id=f"{SESSION}:train:0:{number}", kind="forward", **ids)

    for number in range(2):
        calls.enqueue(call(number))
        calls.finish(call(number), calls.Result({}, bytes(60)))
    with pytest.raises(RateLimited, match="MiB of results"):
        calls.enqueue(call(2))
    calls.check_room(globex.tenant.pk)
    assert calls.find(tenant, call(0).id) == ("forward", calls.Result({}, bytes(60)))
    time.sleep(1.1)  # what was fetched is forgotten
    calls.enqueue(call(2))
    calls.forget(tenant)
    calls.finish(call(1), calls.Result({}, bytes(60)))  # late: nothing of the tenant comes back
    assert calls.forget(tenant) == 0
