"""GrammarService: tries grammars before they reach the engine, and checks finished answers.

Each grammar is first tried in a separate process, with limits of time and memory. If it exceeds
them, only its own request fails, and the engine never gets it. The time for a tenant's new grammars
is limited too, and tenants take turns. Results are cached for each tenant separately, so that an
answer's time does not show what another tenant compiles. The engine never waits for this: a request
whose grammar is being tried is not in the engine yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import structlog

from contract.messages.protocol import ErrorCode
from contract.tenant_cache import TenantCache
from engine.grammar_text import Grammar
from engine.request import Request
from engine.stats import LoadCounts
from worker.errors import Refused
from worker.grammar import trial
from worker.grammar.sandbox_process import SandboxLost, SandboxProcess

log = logging.getLogger(__name__)

#: CPU time, which other work on the machine does not lengthen.
TRIAL_CPU_S = 2.0
TRIAL_MEMORY_BYTES = 512 << 20
CHECK_CPU_S = 1.0
CHECK_MEMORY_BYTES = 256 << 20
#: Python's default limit allows some 150 levels in an answer; this and the stack some 1,300.
CHECK_RECURSION = 8000
MAX_CACHED = 1024
#: For each tenant: number of grammars that may wait for their trial, and CPU seconds of trials per
#: minute.
MAX_WAITING = 16
QUOTA_S, QUOTA_WINDOW_S = 10.0, 60.0
#: Seconds before a grammar that took too long is tried again; perhaps the machine was stalled.
RETRY_S = 60.0

_Trial = tuple[str, Grammar]  # tenant, and its grammar


class _Verdict(NamedTuple):
    """The result of a grammar's trial, and until when it is valid (by `time.monotonic`)."""

    problem: str | None
    until: float


class GrammarService:
    """Owns the two helper processes of a worker, and remembers their results."""

    def __init__(self, model_dir: Path) -> None:
        self._trial = SandboxProcess(
            "grammar-trial",
            trial.set_up,
            str(model_dir),
            memory_bytes=TRIAL_MEMORY_BYTES,
        )
        self._check = SandboxProcess("answer-check", _check_set_up, memory_bytes=CHECK_MEMORY_BYTES)
        # A process has one tokenizer, so tenant and grammar are the whole key.
        self._found: TenantCache[bytes, _Verdict] = TenantCache(MAX_CACHED)
        # until when the verdict is valid
        self._too_slow: TenantCache[bytes, float] = TenantCache(MAX_CACHED)
        self._checks = _FairLock()
        self._trials: dict[_Trial, asyncio.Future[str | None]] = {}
        self._waiting: OrderedDict[str, deque[Grammar]] = OrderedDict()  # by tenant
        self._spent: dict[str, deque[tuple[float, float]]] = {}  # tenant -> when, CPU s
        self._runner: asyncio.Task[None] | None = None
        self.trials = LoadCounts()

    async def admit(self, request: Request) -> None:
        """Wait until the request's grammar has been tried.

        Raises Refused if it failed, or if its tenant has no time left for new grammars.
        """
        grammar = request.grammar
        if grammar is None:
            return
        known = self._found.get(request.tenant_id, _key(grammar.kind, grammar.text))
        if known is not None and time.monotonic() < known.until:
            problem = known.problem
        else:
            problem = await self._tried(grammar, request.tenant_id)
        if problem is not None:
            raise Refused(
                ErrorCode.INVALID_RESPONSE_FORMAT,
                f"The answer's {_NAMES[grammar.kind]} cannot be used: {problem[:500]}.",
                grammar.param,
            )

    async def problem_of(self, schema: str, answer: str, tenant_id: str) -> str | None:
        """Return how a finished answer violates its schema; None: it does not."""
        async with self._checks.turn(tenant_id):
            if time.monotonic() < (self._too_slow.get(tenant_id, _key(schema)) or 0.0):
                return "checking it takes too long"
            try:
                found = await self._check.call(schema, answer, cpu_s=CHECK_CPU_S)
            except SandboxLost as error:
                log.warning("tenant %s: an answer could not be checked: %s", tenant_id, error)
                self._too_slow.put(tenant_id, _key(schema), time.monotonic() + RETRY_S)
                return f"it could not be checked: {error}"
            problem: str | None = found.value
            return problem

    async def start(self) -> None:
        """Start the processes before they are needed."""
        await asyncio.gather(self._trial.start(), self._check.start())

    def stop(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
        self._trial.stop()
        self._check.stop()

    async def _tried(self, grammar: Grammar, tenant_id: str) -> str | None:
        """Try a grammar, once for all requests of its tenant; return what is wrong with it."""
        trial = tenant_id, grammar
        future = self._trials.get(trial)
        if future is None:
            self._check_quota(tenant_id)
            future = self._trials[trial] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant_id, deque()).append(grammar)
            if self._runner is None or self._runner.done():
                self._runner = asyncio.create_task(self._run())
        return await asyncio.shield(future)

    def _check_quota(self, tenant_id: str) -> None:
        if len(self._waiting.get(tenant_id, ())) >= MAX_WAITING:
            raise _over_quota("Too many new schemas are waiting to be compiled.")
        spent, now = self._spent.get(tenant_id), time.monotonic()
        while spent and spent[0][0] < now - QUOTA_WINDOW_S:
            spent.popleft()
        if spent is not None and not spent:
            del self._spent[tenant_id]
        if spent and sum(seconds for _, seconds in spent) > QUOTA_S:
            raise _over_quota(
                f"Compiling new schemas has taken more than {QUOTA_S:g} s of processor time in "
                "a minute."
            )

    async def _run(self) -> None:
        """Try the waiting grammars, one of each tenant in turn."""
        structlog.contextvars.clear_contextvars()  # it is not only for the request that began it
        while self._waiting:
            tenant_id, grammars = self._waiting.popitem(last=False)
            grammar = grammars.popleft()
            if grammars:
                self._waiting[tenant_id] = grammars
            until, seconds = math.inf, 0.0
            try:
                await self._trial.start()  # if the last one was killed; not charged to this tenant
                problem, seconds = await self._trial.call(grammar, cpu_s=TRIAL_CPU_S)
            except SandboxLost as error:
                until, seconds = time.monotonic() + RETRY_S, error.cpu_s
                log.warning("tenant %s: a grammar was given up: %s", tenant_id, error)
                problem = f"compiling it was given up: {error}"
            except Exception:  # for example no file or thread is left: waiting requests must fail
                until = time.monotonic() + RETRY_S
                log.exception("tenant %s: a grammar could not be tried", tenant_id)
                problem = "it could not be tried"
            self.trials.add(seconds)
            self.trials.failures += problem is not None
            spent = self._spent.setdefault(tenant_id, deque())
            spent.append((time.monotonic(), seconds))
            key = _key(grammar.kind, grammar.text)
            self._found.put(tenant_id, key, _Verdict(problem, until))
            future = self._trials.pop((tenant_id, grammar))
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result(problem)


def _check_set_up() -> Callable[[str, str], str | None]:
    from worker.grammar import answer_check  # imports libraries that only the helper needs

    sys.setrecursionlimit(CHECK_RECURSION)
    return answer_check.set_up()


_NAMES = {"json_schema": "schema", "regex": "regular expression", "lark": "grammar"}


def _over_quota(message: str) -> Refused:
    return Refused(ErrorCode.GRAMMAR_QUOTA, f"{message} Retry in a minute.", "json_schema")


def _key(*parts: str) -> bytes:
    """Return a short key for texts that may have hundreds of kilobytes."""
    return hashlib.sha256("\0".join(parts).encode()).digest()


class _FairLock:
    """A lock that tenants take in turn, so that each waits for one job of every other tenant."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it until the block ends."""
        if self._is_taken:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant_id, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # the turn was passed to us just before the cancellation
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant_id, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[tenant_id] = futures
            if not future.done():
                future.set_result(None)
                return
        self._is_taken = False
