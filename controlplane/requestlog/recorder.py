"""Record content that tenants want stored or captured, and count refused requests, in the gateway.

No request waits for this. Prompts and answers are collected in memory while the request runs, and a
thread writes them moments after its end: a gateway that is killed loses the content of its last
moments. The request's log line comes from the worker's record and is never lost.

The policy is read with each write, so that it holds at once in all processes: until then every
request's content is in memory. While PostgreSQL is away, or much waits, only content of tenants
whose policy wanted it lately stays there, up to `MAX_QUEUED_CHARS`; more is not stored.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import functools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from django.db import DataError, IntegrityError, close_old_connections
from django.db import Error as DatabaseError

from contract.messages.protocol import GenerateJob, TokenEvent
from controlplane.requestlog.capture import CaptureRule, captures_keep, rules_of_all
from controlplane.requestlog.refusals import RefusalKey, refusals_add
from controlplane.requestlog.services import Words, content_choices, contents_keep, wants

log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Largest length of a request's prompt, and of its answers; the rest is cut off.
MAX_CHARS = 256 * 1024
MAX_QUEUED_CHARS = 64 * 1024 * 1024
BATCH = 200
WRITE_INTERVAL_S = 0.25
#: Largest age of the policies that decide what waits while PostgreSQL is away.
CHOICES_INTERVAL_S = 5.0
REFUSALS_INTERVAL_S = 5.0
RETRY_S = 2.0


class Transcript:
    """Prompt and answers of one running request."""

    __slots__ = ("_is_cut", "_job", "_num_chars", "_outputs", "_recorder")

    def __init__(self, recorder: Recorder, job: GenerateJob) -> None:
        self._recorder = recorder
        self._job = job
        self._restart()

    def _restart(self) -> None:
        self._outputs: dict[int, list[str]] = {}
        self._num_chars = 0
        self._is_cut = False

    def restart(self) -> None:
        """Forget what was added: the request starts again."""
        self._restart()

    def add(self, event: TokenEvent) -> None:
        """Add an event's text."""
        room = MAX_CHARS - self._num_chars
        if len(event.text) > room:
            self._is_cut = True
        text = event.text[:room]
        self._num_chars += len(text)
        self._outputs.setdefault(event.index, []).append(text)

    def end(self, finish_reason: str) -> None:
        """Pass the content to the recorder, which stores it."""
        prompt, is_cut = _prompt(self._job)
        words = Words(
            tenant_id=uuid.UUID(self._job.tenant_id),
            request_id=self._job.request_id,
            store=self._job.store,
            prompt=prompt,
            outputs=["".join(self._outputs[index]) for index in sorted(self._outputs)],
            finish_reason=finish_reason,
            is_truncated=is_cut or self._is_cut,
            model=self._job.model,
            tools=self._job.tools,
            is_row=_is_row(self._job),
        )
        self._recorder.put(words)


def _is_row(job: GenerateJob) -> bool:
    """Return whether it is a chat with one answer, of a client: not a console's or a suite's."""
    is_clients = job.endpoint.startswith("/v1/")
    return is_clients and job.messages is not None and job.num_choices == 1


def _prompt(job: GenerateJob) -> tuple[dict[str, object], bool]:
    """Return the prompt to store, and whether a part was cut off."""
    if job.token_ids is not None:
        return {"token_ids": list(job.token_ids[:MAX_CHARS])}, len(job.token_ids) > MAX_CHARS
    if job.prompts:
        return _newest("prompts", list(job.prompts), len)
    if job.messages is None:
        text = job.text or ""
        return {"text": text[:MAX_CHARS]}, len(text) > MAX_CHARS
    return _newest("messages", list(job.messages), lambda message: len(str(message)))


def _newest(
    name: str, parts: list[Any], size: Callable[[Any], int]
) -> tuple[dict[str, object], bool]:
    """Return the last parts that fit into the limit, and whether others were cut off."""
    room = MAX_CHARS
    for index in range(len(parts) - 1, -1, -1):
        room -= size(parts[index])
        if room < 0:
            return {name: parts[index + 1 :]}, True
    return {name: parts}, False


class Recorder:
    """The writer of content and refusals; run `run` in the event loop of the requests."""

    def __init__(self) -> None:
        self._queue: collections.deque[Words] = collections.deque()
        self._num_chars = 0
        self._refusals: collections.Counter[RefusalKey] = collections.Counter()
        #: Policies, at most `CHOICES_INTERVAL_S` old; None until they are known.
        self._choices: dict[uuid.UUID, str] | None = None
        self._rules: dict[uuid.UUID, CaptureRule] = {}
        self._choices_due = self._refusals_due = 0.0
        self._is_away = False  # the last write of content failed
        self._news = asyncio.Event()

    def open(self, job: GenerateJob) -> Transcript:
        """Return a transcript for a request's content; its end decides whether it is stored."""
        return Transcript(self, job)

    def put(self, words: Words) -> None:
        size = _size(words)
        has_room = not self._is_away and self._num_chars + size <= MAX_QUEUED_CHARS // 2
        if not has_room and not self._wanted_lately(words):
            return
        if self._num_chars + size > MAX_QUEUED_CHARS:
            log.warning("the content of %s is not stored: too much waits", words.request_id)
            return
        self._queue.append(words)
        self._num_chars += size
        self._news.set()

    def _wanted_lately(self, words: Words) -> bool:
        """Return whether the tenant's last known policies store or capture it."""
        if self._choices is None:
            return True
        choice, rule = self._choices.get(words.tenant_id), self._rules.get(words.tenant_id)
        if choice is not None and wants(choice, words.store):
            return True
        is_captured = rule is not None and rule.takes(words.request_id, words.model, words.store)
        return is_captured and words.is_row

    def refuse(self, tenant_id: uuid.UUID, endpoint: str, status: int, code: str) -> None:
        """Count a request that was refused at admission."""
        hour = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0)
        self._refusals[RefusalKey(tenant_id, hour, endpoint[:64], status, code[:64])] += 1

    async def run(self) -> None:
        """Write the collected content, until cancelled."""
        while True:
            if await self._write():
                await self._wait()
            else:
                await asyncio.sleep(RETRY_S)

    async def _wait(self) -> None:
        """Wait until there is something to write, then a moment to write more at once."""
        due = min(self._choices_due, self._refusals_due) - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, due)):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()
        await asyncio.sleep(WRITE_INTERVAL_S)

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """Write the rest, for at most `timeout_s`; `run` must have ended."""
        self._choices_due, self._refusals_due = float("inf"), 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._write()
        if self._queue:
            log.warning("the content of %d requests is lost", len(self._queue))

    async def _write(self) -> bool:
        """Write all that is due; a failure of one kind stops no other. -> True without failure.

        Content that could not be written stays queued.
        """
        writes = (self._read_choices, self._write_refusals, self._write_words)
        return all([await _succeeds(write) for write in writes])

    async def _read_choices(self) -> None:
        now = time.monotonic()
        if now >= self._choices_due:
            self._rules = await _in_thread(rules_of_all)
            self._choices = await _in_thread(content_choices)
            self._choices_due = now + CHOICES_INTERVAL_S

    async def _write_words(self) -> None:
        while self._queue:
            batch = [self._queue[index] for index in range(min(BATCH, len(self._queue)))]
            try:
                await _in_thread(functools.partial(_keep, batch))
            except DatabaseError:
                self._is_away = True
                raise
            self._is_away = False
            for words in batch:
                self._queue.popleft()
                self._num_chars -= _size(words)

    async def _write_refusals(self) -> None:
        now = time.monotonic()
        if now < self._refusals_due:
            return
        counts, self._refusals = self._refusals, collections.Counter()
        try:
            await _in_thread(lambda: refusals_add(counts))
        except BaseException:
            self._refusals.update(counts)
            raise
        self._refusals_due = now + REFUSALS_INTERVAL_S


async def _succeeds(write: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run a write, and log its failure. -> whether it succeeded."""
    try:
        await write()
    except DatabaseError as error:
        log.warning("the request log waits for PostgreSQL: %r", error)
    except Exception:
        log.exception("the request log cannot be written")
    else:
        return True
    return False


async def _in_thread(query: Callable[[], _T]) -> _T:
    def run() -> _T:
        try:
            return query()
        finally:
            close_old_connections()

    return await asyncio.to_thread(run)


def _keep(batch: list[Words]) -> None:
    """Store a batch; drop only content that cannot be stored, as of a deleted tenant."""
    try:
        contents_keep(batch)
        captures_keep(batch)
    except (DataError, IntegrityError) as error:
        if len(batch) > 1:
            for words in batch:
                _keep([words])
        else:
            log.error("the content of %s cannot be stored: %r", batch[0].request_id, error)


def _size(words: Words) -> int:
    prompt = sum(len(str(part)) for part in words.prompt.values())
    return sum(map(len, words.outputs)) + prompt + (len(str(words.tools)) if words.tools else 0)
