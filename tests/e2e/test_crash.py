"""kill -9 of each process: what was accepted is accounted for, and the next request works."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import openai
import pytest

from demo.processes import ChildProcess
from tests.e2e.system import System

MESSAGES = [{"role": "user", "content": "Tell a long story about a lorikeet."}]


def _kill(process: ChildProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    while process.is_running():
        time.sleep(0.01)


def _begin_stream(system: System, max_tokens: int) -> tuple[str, Any]:
    """The id and the stream of a request that has given its first token."""
    stream = system.client().chat.completions.create(
        model=system.tenants["acme"].adapter,
        messages=MESSAGES,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    return stream.response.headers["x-request-id"], stream


def _assert_answers(system: System) -> None:
    answer = system.client().chat.completions.create(
        model=system.tenants["acme"].adapter, messages=MESSAGES, max_tokens=3
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_killed_worker_loses_no_usage(system: System) -> None:
    request_id, stream = _begin_stream(system, max_tokens=200)
    _kill(system.platform.worker)
    system.platform.worker.start()
    system.platform.worker.wait_until(system.platform.worker_is_up, timeout_s=60)
    # Tokens that the client has cannot be taken back: it is told, in the stream, that this ended.
    with pytest.raises(openai.APIError):
        list(stream)
    record = system.usage_soon(request_id, timeout_s=60)
    assert record["completion_tokens"] > 0
    _assert_answers(system)


def test_request_in_the_queue_of_a_killed_worker_is_answered(system: System) -> None:
    answers: list[Any] = []

    def ask() -> None:
        response = system.client().chat.completions.with_raw_response.create(
            model=system.tenants["acme"].adapter, messages=MESSAGES, max_tokens=40, temperature=0
        )
        answers.append(response)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)  # it is accepted, and has said nothing to its client
    _kill(system.platform.worker)
    system.platform.worker.start()
    thread.join(timeout=90)
    assert len(answers) == 1
    usage = answers[0].parse().usage
    record = system.usage_soon(answers[0].headers["x-request-id"])
    assert record["completion_tokens"] >= usage.completion_tokens > 0


def test_killed_web_process_loses_no_usage(system: System) -> None:
    request_id, stream = _begin_stream(system, max_tokens=60)
    _kill(system.platform.web)
    with pytest.raises(openai.APIError):
        list(stream)
    system.platform.web.start()
    system.platform.wait_until_ready()
    assert system.usage_soon(request_id, timeout_s=60)["completion_tokens"] > 0
    _assert_answers(system)


def test_killed_accountant_loses_no_usage(system: System) -> None:
    _kill(system.platform.accountant)
    response = system.client().chat.completions.with_raw_response.create(
        model=system.tenants["acme"].adapter, messages=MESSAGES, max_tokens=4
    )
    assert system.usage(response.headers["x-request-id"]) is None
    system.platform.accountant.start()
    assert system.usage_soon(response.headers["x-request-id"])["completion_tokens"] == 4
