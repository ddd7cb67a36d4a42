"""Run one batch: check it, answer it line by line, write its files.

Every line's result is a row, unique by batch and line, written under the batch's fence. The files
are made of the rows, and are there when the batch says that it has ended. So after any interruption
the next runner answers the lines that have no row yet, and no line is lost or doubled. A request
that was under way is not sent again: it continues, and the next runner finds it, or its answer, in
the batch's reply stream (`controlplane.queue.batch_reply_stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import close_old_connections
from django.utils import timezone

from contract.process import line_reader
from controlplane.errors import ApiError, Unavailable
from controlplane.files import contents
from controlplane.files.batches import lines, output, results
from controlplane.files.batches.collecting import collect
from controlplane.files.batches.concurrency import Concurrency
from controlplane.files.batches.feeding import Feeder
from controlplane.files.batches.leases import LEASE, RENEW_S, Lease
from controlplane.files.batches.lines import Line, LineFault
from controlplane.files.batches.models import Batch
from controlplane.files.batches.results import Result
from controlplane.files.batches.validation import validate
from controlplane.files.models import File
from controlplane.infra import storage
from controlplane.infra.outages import STORE_OUTAGE
from controlplane.infra.web.threads import in_thread
from controlplane.queue.batch_reply_stream import BatchReplyStream, Fenced
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenancy.row_lease import LeaseLost
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.auth import Permission, Principal
from controlplane.tenants.models import ApiKey

log = logging.getLogger(__name__)

Status = Batch.Status
_T = TypeVar("_T")

#: Seconds between attempts while the database or the store is away.
RETRY_S = 1.0
OUTAGE = (*STORE_OUTAGE, Unavailable)
#: Number of lines that are read at a time.
_READ_LINES = 64
_READ_BYTES = 1024**2
#: Number of threads for passes over files and for writes, for all batches of the runner.
_threads = ThreadPoolExecutor(8, thread_name_prefix="batches")


class _Stop(Exception):
    """No more lines are to be answered."""

    def __init__(self, ends_as: Status, fault: LineFault | None = None) -> None:
        super().__init__(ends_as)
        self.ends_as = ends_as
        self.fault = fault


class _Halted(Exception):
    """The batch was taken from the thread that works on it."""


class Execution:
    """The work on one batch, under the lease that its runner has."""

    def __init__(self, lease: Lease, concurrency: Concurrency) -> None:
        self._lease = lease
        self._concurrency = concurrency
        self._halt = threading.Event()
        self._principal: Principal | None = None
        self._has_input = True

    async def run(self) -> None:
        """Work on the batch to its end. Returns early when another runner has it.

        If it is cancelled, other runners continue with the batch and its running requests.
        """
        try:
            batch = await self._renewed()
            if batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
                await self._until_stopped(batch)
            await self._while_held(self._write_files(), is_answering=False)
        except LeaseLost:
            log.info("batch %s has ended, or another runner has it", self._lease.row_id)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await in_batch_thread(self._lease.release)
            raise

    async def give_up(self) -> None:
        """Fail a batch that no runner could finish."""
        fault = LineFault("internal", "The server failed on this batch.")
        await in_batch_thread(lambda: results.stop(self._lease, Status.FAILED, fault))

    async def _until_stopped(self, batch: Batch) -> None:
        """Answer lines until none is left or something stops it; write how it ends."""
        stop = _Stop(Status.COMPLETED)
        try:
            await self._while_held(self._answer_all(batch), is_answering=True)
        except _Stop as stopped:
            stop = stopped
        await self._with_retry(lambda: results.stop(self._lease, stop.ends_as, stop.fault))

    async def _while_held(self, work: Awaitable[None], *, is_answering: bool) -> None:
        """Do the work while renewing the lease. Raises LeaseLost, and _Stop while answering."""
        working = asyncio.ensure_future(work)
        holding = asyncio.create_task(self._hold(is_answering))
        tasks: set[asyncio.Future[None]] = {working, holding}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (working if working.done() else holding).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _hold(self, is_answering: bool) -> None:
        """Renew the lease until cancelled. Raises LeaseLost, and _Stop when the batch must end."""
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                batch = await self._renewed()
                renewed_at = loop.time()
            except OUTAGE as error:
                log.warning("the lease of batch %s: %r", self._lease.row_id, error)
                if loop.time() - renewed_at > LEASE.total_seconds() - 2 * RENEW_S:
                    raise LeaseLost from error
                continue
            if is_answering:
                self._check(batch)

    async def _renewed(self) -> Batch:
        batch, self._principal, self._has_input = await in_batch_thread(lambda: _load(self._lease))
        return batch

    def _check(self, batch: Batch) -> None:
        """Raise _Stop for a batch that is cancelled or expired, or whose key or file is gone."""
        if batch.status == Status.CANCELLING:
            raise _Stop(Status.CANCELLED)
        if timezone.now() >= batch.expires_at:
            raise _Stop(Status.EXPIRED)
        if self._principal is None:
            message = (
                "The API key that made this batch was revoked, has expired or lacks permission now."
            )
            raise _Stop(Status.FAILED, LineFault("api_key_ended", message))
        if not self._has_input:
            raise _input_gone()

    async def _answer_all(self, batch: Batch) -> None:
        self._check(batch)
        if batch.status == Status.VALIDATING:
            await self._with_retry(lambda: self._validate(batch))
            batch = await self._renewed()
            self._check(batch)
        while True:
            try:
                return await self._feed(batch)
            except OUTAGE as error:
                log.warning("batch %s waits: %r", self._lease.row_id, error)
                await asyncio.sleep(RETRY_S)

    async def _feed(self, batch: Batch) -> None:
        """Answer the lines that have no result yet."""
        done = await self._with_retry(lambda: results.done_lines(self._lease))
        async with self._batch_stream(is_ending=False) as batch_stream:
            await batch_stream.settle(done)
            feeder = Feeder(
                batch_id=batch.pk,
                endpoint=batch.endpoint,
                deadline=batch.expires_at.timestamp(),
                principal=self._known_principal,
                concurrency=self._concurrency,
                batch_stream=batch_stream,
                keep=self._keep,
            )
            with self._concurrency.joined(batch.pk):
                await feeder.run(self._lines(batch, lambda number: number not in done))

    @contextlib.asynccontextmanager
    async def _batch_stream(self, *, is_ending: bool) -> AsyncIterator[BatchReplyStream]:
        """Open the batch's reply stream. Raises LeaseLost, and Unavailable.

        is_ending  refuse lines that this runner still sends: the batch ends
        """
        dispatcher = await get_dispatcher()
        fence = 2 * self._lease.fence + is_ending
        try:
            async with dispatcher.batch_stream(self._lease.row_id, fence) as batch_stream:
                yield batch_stream
        except Fenced as error:
            raise LeaseLost from error

    def _known_principal(self) -> Principal:
        assert self._principal is not None
        return self._principal

    async def _keep(self, found: list[Result]) -> None:
        await self._with_retry(lambda: results.keep(self._lease, found))

    def _validate(self, batch: Batch) -> None:
        """Check all lines, in a thread. The batch is in_progress then, or failed."""
        results.begin_validation(self._lease)
        found = validate(
            self._raw_lines(batch),
            endpoint=batch.endpoint,
            principal=self._known_principal(),
            keep=lambda refusals: results.keep_refusals(self._lease, refusals),
        )
        results.end_validation(self._lease, found)

    def _raw_lines(self, batch: Batch) -> Iterator[bytes]:
        """Yield the lines of the input file, also of a deleted one whose bytes are still there.

        Raises _Stop when it is gone, _Halted when halted.
        """
        with tenant_scope(self._lease.tenant_id):
            file = File.objects.filter(pk=batch.input_file_id).first()
        close_old_connections()  # no connection stays open while the store is read
        if file is None:
            raise _input_gone()
        found = line_reader.lines(contents.pieces(file), max_bytes=lines.MAX_LINE_BYTES)
        try:
            for raw in found:
                if self._halt.is_set():
                    raise _Halted
                yield raw
        except storage.ObjectMissing:
            raise _input_gone() from None

    async def _lines(self, batch: Batch, wants: Callable[[int], bool]) -> AsyncIterator[Line]:
        """Yield the wanted lines, read as they are asked for."""
        numbered = enumerate(self._raw_lines(batch), start=1)

        def read() -> list[Line]:
            found: list[Line] = []
            num_bytes = 0
            for number, raw in numbered:
                if not wants(number) or not raw.strip():
                    continue
                found.append(lines.parse_line(number, raw, batch.endpoint))
                num_bytes += len(raw)
                if len(found) >= _READ_LINES or num_bytes >= _READ_BYTES:
                    break
            return found

        while found := await self._in_thread(read):
            for line in found:
                yield line

    async def _write_files(self) -> None:
        """Write the results to files and end the batch; one that has failed has no files."""
        self._halt.clear()
        batch = await self._renewed()
        if batch.has_ended:
            return
        while True:
            try:
                await self._collect(batch)
                break
            except OUTAGE as error:
                log.warning("batch %s waits: %r", self._lease.row_id, error)
                await asyncio.sleep(RETRY_S)
        await self._with_retry(lambda: output.write(self._lease, batch, self._left(batch)))
        log.info(
            "batch ended",
            extra={
                "batch_id": batch.public_id,
                "tenant_id": str(self._lease.tenant_id),
                "outcome": batch.ends_as,
                "lines": batch.num_lines,
            },
        )

    async def _collect(self, batch: Batch) -> None:
        """Keep the answers that exist when the batch is stopped, and cancel the rest."""
        done = await self._with_retry(lambda: results.done_lines(self._lease))
        async with self._batch_stream(is_ending=True) as batch_stream:
            await batch_stream.settle(done)
            if left := batch_stream.lines_under_way:
                found = await collect(
                    self._lines_left(batch, left),
                    endpoint=batch.endpoint,
                    principal=self._principal,
                    batch_stream=batch_stream,
                )
                await self._keep(found)
            await batch_stream.close()

    async def _lines_left(self, batch: Batch, left: set[int]) -> AsyncIterator[Line]:
        """Yield the lines of these numbers; none if the input is gone."""
        with contextlib.suppress(_Stop):
            async for line in self._lines(batch, left.__contains__):
                yield line

    def _left(self, batch: Batch) -> Iterator[bytes]:
        """Yield the input's lines; none if it is gone."""
        with contextlib.suppress(_Stop):
            yield from self._raw_lines(batch)

    async def _with_retry(self, work: Callable[[], _T]) -> _T:
        """Do the work in a thread, again while the database or the store is away."""
        while True:
            try:
                return await self._in_thread(work)
            except OUTAGE as error:
                log.warning("batch %s waits: %r", self._lease.row_id, error)
                await asyncio.sleep(RETRY_S)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Do the work in a thread; when cancelled, wait until the thread has noticed."""
        future = asyncio.ensure_future(in_batch_thread(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._halt.set()
            await asyncio.wait({future})
            raise
        finally:
            if future.done() and not future.cancelled():
                future.exception()  # so that asyncio does not log it


async def in_batch_thread(work: Callable[[], _T]) -> _T:
    """Run a query or a pass over a file in the threads of batches."""
    return await in_thread(work, executor=_threads)


def _input_gone() -> _Stop:
    return _Stop(Status.FAILED, LineFault("input_file_gone", "The input file was deleted."))


def _load(lease: Lease) -> tuple[Batch, Principal | None, bool]:
    """Renew the lease; return the batch, the principal (None if the key has ended), and whether
    the input file is still there."""
    batch = lease.renew()
    return batch, _principal_of(lease, batch), _has_input(lease, batch)


def _has_input(lease: Lease, batch: Batch) -> bool:
    with tenant_scope(lease.tenant_id):
        return File.objects.filter(pk=batch.input_file_id, status=File.Status.READY).exists()


def _principal_of(lease: Lease, batch: Batch) -> Principal | None:
    with tenant_scope(lease.tenant_id):
        keys = ApiKey.objects.select_related("tenant", "owner__user", "service_account")
        api_key = keys.filter(pk=batch.api_key_id).first() if batch.api_key_id else None
        if api_key is None:
            return None
        try:
            principal = auth.standing_principal(api_key)
            auth.authorize(principal, Permission.INFER)
            auth.authorize(principal, Permission.BATCHES_WRITE)
        except ApiError:
            return None
    return principal
