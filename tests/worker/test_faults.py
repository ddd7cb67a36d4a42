# ruff: noqa: F811  (fixtures)
"""Small histories with faults: processes killed and stopped while requests run.

Whatever happens, every accepted request ends, and has one usage record.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from contract.messages import protocol
from contract.queue import fair_queue, scripts
from tests.fakes import DEADLY_SEED, FAKE_NAME
from tests.live import Process, wait_for
from tests.worker.scenes import (  # noqa: F401
    STEP_S,
    TOKENS,
    Call,
    Scene,
    accountant,
    pool,
    restarted,
    scene,
    web,
    worker,
    worker_id,
)


def test_a_killed_worker_continues_what_nobody_has_seen(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    calls = scene.calls(streamed=3, whole=3)
    wait_for(lambda: scene.pending(worker_id(request)) == 6, what="taking up")
    worker.kill()
    with restarted(scene.live, worker_id(request)):
        for call in calls:
            call.wait()
    for call in calls[:3]:  # an answer half seen cannot be continued, and is not billed as whole
        assert isinstance(call.error, openai.APIError)
        assert getattr(call.error, "code", None) == "worker_lost"
        row = scene.usage(call)
        assert (row["finish_reason"], row["completion_tokens"] > 0) == ("error", True)
        assert row["completion_tokens"] < TOKENS
    for call in calls[3:]:
        assert call.error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    assert scene.pending(worker_id(request)) == 0


def test_a_request_that_was_only_queued_waits_for_the_restart(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    worker.kill()
    key = scene.live.tenants["acme"].key
    calls = [Call(stream=index % 2 == 0).start(scene.url, key) for index in range(4)]
    with restarted(scene.live, worker_id(request)):
        for call in calls:
            assert call.wait().error is None, call.error
            assert scene.usage(call)["completion_tokens"] == TOKENS


def test_a_dead_engine_ends_the_worker(scene: Scene, worker: Process) -> None:
    (engine,) = (
        child
        for child in psutil.Process(worker.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    )
    os.kill(engine.pid, signal.SIGKILL)
    assert wait_for(lambda: worker.exit_code, what="the worker's end") == 1


def test_a_stuck_engine_ends_the_worker(scene: Scene, request: pytest.FixtureRequest) -> None:
    name = worker_id(request)
    worker = scene.live.start_worker(name, step_s=STEP_S, LORIKEET_STUCK_TIMEOUT_S="2")
    (call,) = scene.calls(streamed=0, whole=1)
    wait_for(lambda: scene.pending(name) == 1, what="taking up")
    (engine,) = (
        child
        for child in psutil.Process(worker.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    )
    engine.suspend()
    assert wait_for(lambda: worker.exit_code, what="the worker's end") == 1
    with restarted(scene.live, name):
        assert call.wait().error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    scene.live.forget_worker(name)


def test_a_request_that_kills_its_worker_is_given_up(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    key = scene.live.tenants["acme"].key
    deadly = Call(stream=True, seed=DEADLY_SEED).start(scene.url, key)
    assert wait_for(lambda: worker.exit_code, what="the first crash") == 1
    second = scene.live.start_worker(worker_id(request), step_s=STEP_S, wait=False)
    assert wait_for(lambda: second.exit_code, what="the second crash") == 1
    with restarted(scene.live, worker_id(request)):
        assert getattr(deadly.wait().error, "code", None) == "request_given_up"
        harmless = Call(stream=True).start(scene.url, key).wait()
        assert scene.usage(harmless)["completion_tokens"] == TOKENS
    assert scene.pending(worker_id(request)) == 0


def test_a_stream_that_waits_is_kept_alive(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    worker.kill()
    body = {"model": FAKE_NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"Authorization": f"Bearer {scene.live.tenants['acme'].key}"}
    url = f"{scene.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as response:
        assert response.status_code == 200  # said before anything is known of the request
        pieces = response.iter_raw()
        received = next(pieces) + next(pieces)
        assert received.startswith(b'data: {"id":')
        assert received.endswith(b"\n\n: keep-alive\n\n")
        with restarted(scene.live, worker_id(request)):
            received += b"".join(pieces)
    assert received.endswith(b"data: [DONE]\n\n")


def test_a_killed_worker_leaves_no_engine_behind(scene: Scene, worker: Process) -> None:
    children = psutil.Process(worker.pid).children()
    worker.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children
    assert not alive


def test_a_drained_worker_finishes_what_runs(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    calls = scene.calls(streamed=2, whole=2)
    wait_for(lambda: scene.pending(worker_id(request)) == 4, what="taking up")
    worker.signal(signal.SIGTERM)
    for call in calls:
        assert call.wait().error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    assert wait_for(lambda: worker.exit_code is not None, what="the worker's end")
    assert worker.exit_code == 0
    assert scene.live.heartbeat(worker_id(request)) is None


def test_what_a_drained_worker_cannot_finish_waits_for_the_next_run(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    name = worker_id(request)
    first = scene.live.start_worker(name, step_s=0.1, LORIKEET_DRAIN_TIMEOUT_S="1")
    streamed, whole = scene.calls(streamed=1, whole=1)
    wait_for(lambda: scene.pending(name) == 2, what="taking up")
    assert first.stop() == 0
    assert getattr(streamed.wait().error, "code", None) == "worker_lost"
    assert 0 < scene.usage(streamed)["completion_tokens"] < TOKENS
    with restarted(scene.live, name):
        assert whole.wait().error is None, whole.error
        assert scene.usage(whole)["completion_tokens"] == TOKENS
    scene.live.forget_worker(name)


def test_work_waits_for_a_worker_that_loads(scene: Scene, request: pytest.FixtureRequest) -> None:
    name = worker_id(request)
    process = scene.live.start_worker(name, step_s=STEP_S, load_s=4, wait=False)
    try:
        heartbeat = wait_for(lambda: scene.live.heartbeat(name), what="the first heartbeat")
        assert heartbeat.loading
        (call,) = scene.calls(streamed=0, whole=1)
        assert call.wait().error is None, call.error
        wait_for(lambda: not scene.live.heartbeat(name).loading, what="a heartbeat after the load")
        assert process.stop() == 0
    finally:
        process.end()
        scene.live.forget_worker(name)


def test_a_job_that_redis_forgot_ends(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    worker.kill()  # so that it stays queued
    call = Call(stream=False).start(scene.url, scene.live.tenants["acme"].key)
    pattern = f"job:{{{scene.live.pool}}}:*"
    queued = wait_for(
        lambda: [
            key
            for key in scene.live.redis.scan_iter(pattern)
            if scene.live.redis.hget(key, "state") == b"queued"
        ],
        what="the job",
    )
    scene.live.redis.delete(*queued)
    error = call.wait().error
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "worker_lost")
    with restarted(scene.live, worker_id(request)):  # nor does it come back
        wait_for(lambda: scene.pending(worker_id(request)) == 0, what="the empty inbox")


def test_what_was_taken_with_a_lost_reply_is_found(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    """The connection broke between the script and its reply, and Redis's client asked again."""
    live, name = scene.live, worker_id(request)
    os.killpg(worker.pid, signal.SIGSTOP)
    (call,) = scene.calls(streamed=0, whole=1)
    inbox, queue = protocol.inbox_key(live.pool, name), fair_queue.queue_key(live.pool, FAKE_NAME)
    args = [live.pool, name, live.heartbeat(name).boot_id, 4, protocol.INBOX_GROUP]  # type: ignore[union-attr]
    take = functools.partial(live.redis.eval, scripts.load("pull"), 3, queue, inbox, "-", *args)
    wait_for(take, what="the request in the queue")
    os.killpg(worker.pid, signal.SIGCONT)
    assert call.wait().error is None, call.error


def test_a_paused_worker_gets_its_own_requests_again(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    """Taken for dead and the only one: what its engine still has is not what it has pulled."""
    name = worker_id(request)
    calls = scene.calls(streamed=0, whole=2)
    wait_for(lambda: scene.pending(name) == 2, what="taking up")
    os.killpg(worker.pid, signal.SIGSTOP)
    wait_for(lambda: scene.pending(name) == 0, timeout_s=30, what="the reaper's turn")
    os.killpg(worker.pid, signal.SIGCONT)
    for call in calls:
        assert call.wait().error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    assert scene.pending(name) == 0


def test_a_paused_worker_that_was_replaced_can_do_no_harm(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    calls = scene.calls(streamed=2, whole=2)
    wait_for(lambda: scene.pending(worker_id(request)) == 4, what="taking up")
    os.killpg(worker.pid, signal.SIGSTOP)
    with restarted(scene.live, worker_id(request)):
        for call in calls[2:]:
            call.wait()
        os.killpg(worker.pid, signal.SIGCONT)  # it goes on where it was, under its old lease
        for call in calls[:2]:
            assert call.wait().error is not None
        for call in calls[2:]:
            assert call.error is None, call.error
            assert len(call.text) == len(calls[2].text)
        for call in calls:
            assert scene.usage(call)["finish_reason"] == ("error" if call.stream else "length")
    for call in calls:
        assert len(scene.live.usage_rows(call.request_id)) == 1


def test_a_killed_gateways_requests_are_cancelled(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    name = worker_id(request)
    # So slow that the context is not full before the gateway's heartbeat has lapsed.
    worker = scene.live.start_worker(name, step_s=0.1)
    web, url = scene.live.start_web("doomed")
    key = scene.live.tenants["acme"].key
    call = Call(stream=True)
    call._run = lambda *_: _read_long(call, url, key)  # type: ignore[method-assign]
    call.start(url, key)
    assert call.first.wait(20)
    web.kill()
    row = wait_for(
        lambda: scene.live.usage_rows(call.request_id), timeout_s=25, what="the cancellation"
    )[0]
    assert row["finish_reason"] == "cancelled"
    assert row["completion_tokens"] > 0
    assert scene.pending(name) == 0
    worker.end()
    scene.live.forget_worker(name)


def _read_long(call: Call, url: str, key: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    stream = client.chat.completions.create(
        model=FAKE_NAME,
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        extra_body={"ignore_eos": True},
        max_tokens=100_000,
    )
    with contextlib.suppress(Exception):
        call._read(stream)


def test_a_worker_that_has_just_left_gets_nothing(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    with restarted(scene.live, "leaves-now") as leaving:
        time.sleep(1.5)  # until the gateway has heard of both
        leaving.kill()
        scene.live.forget_worker("leaves-now")
        calls = scene.calls(streamed=2, whole=2)
    for call in calls:
        assert call.wait().error is None, call.error
    assert scene.pending("leaves-now") == 0


def test_who_asks_while_the_only_worker_is_replaced_waits(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    live, name = scene.live, worker_id(request)
    queue = fair_queue.queue_key(live.pool, FAKE_NAME)
    begin = live.redis.time()[0]
    wait_for(
        lambda: (live.redis.zscore(fair_queue.served_key(live.pool), queue) or 0) >= begin,
        what="a reaper's look at the worker",
    )
    assert worker.stop() == 0
    time.sleep(1.5)  # until the gateway has seen that it is gone
    calls = scene.calls(streamed=0, whole=2)
    time.sleep(0.5)
    with restarted(live, name):
        for call in calls:
            assert call.wait().error is None, call.error


def test_another_worker_takes_over_from_a_dead_one(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    calls = scene.calls(streamed=1, whole=3)
    wait_for(lambda: scene.pending(worker_id(request)) == 4, what="taking up")
    worker.end()
    with restarted(scene.live, "successor"):
        for call in calls:
            call.wait()
    assert getattr(calls[0].error, "code", None) == "worker_lost"
    for call in calls[1:]:
        assert call.error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    for call in calls:
        assert len(scene.live.usage_rows(call.request_id)) == 1
    scene.live.forget_worker("successor")


def test_a_killed_accountant_settles_the_rest_after_its_restart(
    scene: Scene, worker: Process, accountant: Process
) -> None:
    accountant.kill()
    calls = [call.wait() for call in scene.calls(streamed=2, whole=2)]
    assert not any(scene.live.usage_rows(call.request_id) for call in calls)
    again = scene.live.start_accountant("accountant-again")
    for call in calls:
        assert scene.usage(call)["completion_tokens"] == TOKENS
    again.stop()  # no test after this one has an accountant
