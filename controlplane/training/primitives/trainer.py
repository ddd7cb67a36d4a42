"""Trainer: does the queued calls of one base's training clients, with one child.

Each call has a thread, which asks the child, the store and the database; the child sends passes of
different clients through the model together. A client's state is in the child's memory from its
first call until it is idle, or others need the room: then it goes to the store.

Before the first call that changes a state, the client's row gets this trainer's name, and loses it
when the state is in the store. So a row with another trainer's name has lost its state.
"""

from __future__ import annotations

import datetime as dt
import logging
import shutil
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection
from django.db.models import F
from django.utils import timezone

from controlplane.adapters import services as adapter_services
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.errors import ApiError, Unavailable
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_CALLS, TRAINING_CLIENT_STATES
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training.models import TrainingRun
from controlplane.training.primitives import calls, states
from controlplane.training.primitives.calls import Call, Result
from controlplane.training.primitives.child import Child, ChildLost
from controlplane.training.primitives.models import ClientState, TrainingClient
from controlplane.training.runs import picking
from controlplane.training.runs.running import ADAPTER_FILES
from controlplane.usage.training import training_usage_add

log = logging.getLogger(__name__)

#: Seconds without a call after which a client's state leaves the memory, and without a client after
#: which the trainer ends.
IDLE_S, LINGER_S = 60.0, 20.0
#: Seconds after which the trainer leaves the device to training runs that wait.
TURN_S = 900.0
#: Pause between two looks for calls.
_LOOK_S = 0.02
#: Clients whose calls are under way at a time.
MAX_THREADS = 64
#: Seconds that a version may take from its upload to its last check.
_READY_S = 600.0
#: Seconds of use of the device after which it is written.
_USAGE_S = 60.0
_MUTATING = ("forward_backward", "optim_step", "load")
LOST = (
    "The trainer was lost, and with it what this client has trained since its last save_state. "
    "Load a saved state into it, or into a new client."
)
Status = AdapterVersion.Status


@dataclass(slots=True)
class _Resident:
    """A client in the child's memory.

    is_dirty  its state is nowhere else
    tokens, seconds  used, and not written yet
    """

    row: TrainingClient
    is_dirty: bool = False
    used_at: float = field(default_factory=time.monotonic)
    tokens: int = 0
    seconds: float = 0.0


class CallFailed(Exception):
    """Raised when a call cannot be done; the message is for its client.

    category  whose fault it is, as Tinker's client reads it
    """

    def __init__(self, message: str, category: str = "user") -> None:
        super().__init__(message)
        self.category = category


class Trainer:
    """The trainer of a base's clients while it has the base's lease, under the name `boot`."""

    def __init__(self, base: BaseModel, child: Child, folder: Path, boot: str) -> None:
        self._base, self._child, self._folder, self._boot = base, child, folder, boot
        self._residents: dict[uuid.UUID, _Resident] = {}
        self._busy: set[uuid.UUID] = set()  # clients with a thread
        self._changed = threading.Condition()
        self._num_passes = 0
        #: Each client's last call, until the queue has taken its result.
        self._done: dict[uuid.UUID, tuple[str, Result]] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, "calls")

    def run(self) -> None:
        """Do calls until none come, or others are to have the device. Raises ChildLost."""
        began = idle_since = looked_at = time.monotonic()
        try:
            while not self._child.has_ended:
                now = time.monotonic()
                if now - looked_at > calls.LEASE_S / 6:
                    looked_at = now
                    if not calls.lease_renew(self._base.pk, self._boot):
                        raise ChildLost  # another trainer has begun: this one changes nothing more
                    if self._is_over(began):
                        break
                self._take_calls()
                self._put_idle_away(now, IDLE_S)
                if self._residents or self._busy:
                    idle_since = now
                elif now - idle_since > LINGER_S:
                    break
                time.sleep(_LOOK_S)
            self._end()
        finally:
            self._threads.shutdown()

    def _is_over(self, began: float) -> bool:
        """Return whether training runs are to have the device."""
        if picking.window_opens_at() is not None:
            return True
        with all_tenants(reason="the runs that wait are of all tenants"):
            runs = TrainingRun.objects.filter(status=TrainingRun.Status.QUEUED)
            return time.monotonic() - began > TURN_S and runs.exists()

    def _take_calls(self) -> None:
        """Give each client that has a call, and none under way, a thread."""
        for tenant_id, client_id in calls.waiting(self._base.pk):
            with self._changed:
                if client_id in self._busy or len(self._busy) >= MAX_THREADS:
                    continue
                self._busy.add(client_id)
            self._threads.submit(self._do_head, tenant_id, client_id)

    def _put_idle_away(self, now: float, idle_s: float) -> None:
        with self._changed:
            idle = [
                client_id
                for client_id, resident in self._residents.items()
                if client_id not in self._busy and now - resident.used_at >= idle_s
            ]
            self._busy.update(idle)
        for client_id in idle:
            self._threads.submit(self._leaving, client_id)

    def _end(self) -> None:
        """Put all states away once the calls under way are done. Raises ChildLost."""
        while (self._residents or self._busy) and not self._child.has_ended:
            self._put_idle_away(time.monotonic(), 0.0)
            calls.lease_renew(self._base.pk, self._boot)
            time.sleep(0.1)
        if self._child.has_ended:
            raise ChildLost

    def _leaving(self, client_id: uuid.UUID) -> None:
        try:
            with tenant_scope(self._residents[client_id].row.tenant_id):
                self._put_away(client_id)
        except Exception as error:  # it stays: the next look tries again
            log.warning("a training client's state stays in memory: %r", error)
            if client_id in self._residents:
                self._residents[client_id].used_at = time.monotonic()
        finally:
            self._leave(client_id)

    def _leave(self, client_id: uuid.UUID) -> None:
        connection.close()
        with self._changed:
            self._busy.discard(client_id)
            self._changed.notify_all()

    def _put_away(self, client_id: uuid.UUID) -> None:
        """Move a client's state from the memory to the store. Raises what these raise.

        The row is changed last: until then a lost trainer is seen as one.
        """
        resident = self._residents[client_id]
        row, path = resident.row, self._folder / f"{client_id}.away"
        key = ""
        if resident.is_dirty:
            self._child.ask(state=str(client_id), file=str(path), has_gradient=True)
            key = states.store(row, path)
            size = path.stat().st_size
            path.unlink()
            mine = TrainingClient.objects.filter(pk=row.pk, trainer=self._boot)
            if mine.update(trainer="", state_key=key, state_bytes=size):
                storage.delete([row.state_key] if row.state_key else [])
            else:
                storage.delete([key])
            TRAINING_CLIENT_STATES.labels("stored").inc()
        self._write_usage(resident)
        self._child.ask(close=str(client_id))
        del self._residents[client_id]

    def _do_head(self, tenant_id: uuid.UUID, client_id: uuid.UUID) -> None:
        """Do a client's first call, and keep its result."""
        call = None
        try:
            call = calls.head(self._base.pk, tenant_id, client_id)
            if call is not None:
                call_id, result = self._done.get(client_id, ("", Result({})))
                if call_id != call.id:
                    with tenant_scope(tenant_id):
                        result = self._result(call)
                    self._done[client_id] = call.id, result
                calls.finish(call, result)
                del self._done[client_id]
                failed = "failed" if "error" in result.said else "done"
                TRAINING_CALLS.labels(call.kind, failed).inc()
        except Exception:  # the queue does not answer: the call is still its client's first
            log.exception("a training client's call could not be done")
            time.sleep(1.0)
        finally:
            self._leave(client_id)

    def _result(self, call: Call) -> Result:
        try:
            return self._do(call)
        except CallFailed as error:
            return Result({"error": str(error), "category": error.category})
        except ApiError as error:
            category = "user" if error.status < 500 else "server"
            return Result({"error": error.message, "category": category})
        except ChildLost:
            resident = self._residents.get(call.client_id)
            is_lost = resident is not None and resident.is_dirty
            message = LOST if is_lost else "The trainer was lost. Send the call again."
            return Result({"error": message, "category": "server"})
        except storage.ObjectMissing:
            return Result({"error": "The state is gone. Load another one.", "category": "server"})
        except Exception as error:
            log.exception("a training client's call failed")
            what = "The object store does not answer." if _is_store(error) else "The server failed."
            return Result({"error": f"{what} Send the call again.", "category": "server"})

    def _do(self, call: Call) -> Result:
        rows = TrainingClient.objects.filter(pk=call.client_id).select_related("base_model")
        row = rows.first()
        if row is None:
            raise CallFailed("This client was deleted.")
        rows.update(used_at=timezone.now())
        if call.kind == "load":
            return self._load(call, row)
        resident = self._residents.get(row.pk) or self._open(row)
        resident.used_at = time.monotonic()
        if call.kind in _MUTATING:
            self._mark_dirty(resident)
        try:
            return getattr(self, f"_{call.kind}")(call, resident)  # type: ignore[no-any-return]
        finally:
            resident.used_at = time.monotonic()

    def _ask(self, **order: Any) -> dict[str, Any]:
        answer = self._child.ask(**order)
        if "error" in answer:
            field_of = f"{answer['field']}: " if answer.get("field") else ""
            raise CallFailed(f"{field_of}{answer['error']}")
        return answer

    def _open(self, row: TrainingClient) -> _Resident:
        """Bring a client's state into the memory. Raises CallFailed if it is lost."""
        if row.is_lost or row.trainer:
            TrainingClient.objects.filter(pk=row.pk).update(is_lost=True, trainer="")
            raise CallFailed(LOST, "server")
        if not row.state_key:
            return self._enter(row, None)
        path = self._folder / f"{row.pk}.state"
        states.fetch(row.state_key, path)
        return self._enter(row, path)

    def _enter(
        self, row: TrainingClient, path: Path | None, *, keeps_optimiser: bool = True
    ) -> _Resident:
        """Give a client a place in the memory, and others' places up for it."""
        order = {
            "open": str(row.pk),
            "tenant": str(row.tenant_id),
            "settings": row.settings,
            "state": None if path is None else str(path),
            "keeps_optimiser": keeps_optimiser,
        }
        while self._ask(**order).get("full"):
            self._make_room()
        if path is not None:
            path.unlink()
            TRAINING_CLIENT_STATES.labels("fetched").inc()
        resident = self._residents[row.pk] = _Resident(row)
        return resident

    def _make_room(self) -> None:
        """Put the client away that has been idle the longest, or wait for one that is."""
        with self._changed:
            idle = [each for each in self._residents if each not in self._busy]
            if not idle:
                self._changed.wait(1.0)
                return
            oldest = min(idle, key=lambda each: self._residents[each].used_at)
            self._busy.add(oldest)
        try:
            with tenant_scope(self._residents[oldest].row.tenant_id):
                self._put_away(oldest)
        finally:
            with self._changed:
                self._busy.discard(oldest)
                self._changed.notify_all()

    def _mark_dirty(self, resident: _Resident) -> None:
        """Note in the row that the newest state will be in this trainer's memory alone."""
        if resident.is_dirty:
            return
        rows = TrainingClient.objects.filter(pk=resident.row.pk, trainer="")
        if not rows.update(trainer=self._boot, is_lost=False):
            raise CallFailed(LOST, "server")
        resident.is_dirty = True

    def _create(self, call: Call, resident: _Resident) -> Result:
        return Result({"model_id": resident.row.model_id})

    def _forward(self, call: Call, resident: _Resident) -> Result:
        path = self._folder / f"{resident.row.pk}.pass"
        path.write_bytes(call.body)
        began = time.monotonic()
        with self._changed:
            self._num_passes += 1
        try:
            loss = self._ask(**{"pass": str(resident.row.pk), "file": str(path)})["loss"]
        finally:
            path.unlink()
            with self._changed:
                num_sharing, self._num_passes = self._num_passes, self._num_passes - 1
        out = Path(f"{path}.out")
        logprobs = out.read_bytes()
        out.unlink()
        resident.tokens += sum(call.said["lengths"])
        resident.seconds += (time.monotonic() - began) / num_sharing
        if resident.seconds > _USAGE_S:
            self._write_usage(resident)
        said = {"lengths": call.said["lengths"], "metrics": {"loss:sum": loss}}
        return Result(said, logprobs)

    _forward_backward = _forward

    def _optim_step(self, call: Call, resident: _Resident) -> Result:
        norm = float(self._ask(step=str(resident.row.pk), adam=call.said)["norm"])
        if not abs(norm) < float("inf"):
            raise CallFailed(
                "The gradient is not finite: the step was not made, and the gradient is dropped. "
                "Send smaller weights, or a smaller learning rate."
            )
        return Result({"metrics": {"gradient_norm": norm}})

    def _save(self, call: Call, resident: _Resident) -> Result:
        """Save a state: it is in the store, and its row written, before the client knows."""
        row, name = resident.row, call.said["name"]
        taken = ClientState.objects.filter(client=row, kind=ClientState.Kind.WEIGHTS, name=name)
        if not call.said["overwrite"] and taken.exists():
            raise CallFailed(f"There is a state {name} already: choose another name.")
        path = self._folder / f"{row.pk}.saved"
        self._ask(state=str(row.pk), file=str(path), has_gradient=False)
        key = states.store(row, path)
        try:
            size = path.stat().st_size
            state, before = states.state_save(row, name, key, size, _expiry(call))
        except BaseException:
            storage.delete([key])
            raise
        path.unlink()
        storage.delete([before] if before else [])
        return Result({"path": state.path, "type": "save_weights"})

    def _load(self, call: Call, row: TrainingClient) -> Result:
        """Put a saved state in the place of the client's, which may be lost."""
        states_of = ClientState.objects.select_related("client")
        saved = states_of.filter(pk=call.said["state"]).first()
        if saved is None:
            raise CallFailed("There is no such state.")
        if any(saved.client.settings[name] != row.settings[name] for name in _SHAPE):
            raise CallFailed("The state is of an adapter with another rank or other targets.")
        path = self._folder / f"{row.pk}.state"
        states.fetch(saved.key, path)
        if (old := self._residents.pop(row.pk, None)) is not None:
            self._write_usage(old)
            self._ask(close=str(row.pk))
        TrainingClient.objects.filter(pk=row.pk).update(trainer=self._boot, is_lost=False)
        resident = self._enter(row, path, keeps_optimiser=call.said["optimizer"])
        resident.is_dirty = True
        return Result({"path": saved.path, "model_id": row.model_id, "type": "load_weights"})

    def _sampler(self, call: Call, resident: _Resident) -> Result:
        """Make the adapter's next version, which an unnamed one's policy never makes live."""
        row, folder = resident.row, self._folder / f"{resident.row.pk}.adapter"
        self._ask(adapter=str(row.pk), folder=str(folder), base=row.base_model.name)
        try:
            version = _publish(row, folder, is_named=bool(call.said["name"]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        model = f"{row.adapter_name}@{version.number}"
        if not call.said["name"]:
            return Result({"sampling_session_id": f"{call.said['session']}:{model}"})
        state, _ = ClientState.objects.update_or_create(
            client=row,
            kind=ClientState.Kind.SAMPLER,
            name=call.said["name"],
            defaults={"version": version, "expires_at": _expiry(call)},
        )
        return Result({"path": state.path})

    def _write_usage(self, resident: _Resident) -> None:
        """Write what the client used of the device since the last time."""
        if not resident.tokens:
            return
        rows = TrainingClient.objects.filter(pk=resident.row.pk)
        rows.update(num_usages=F("num_usages") + 1)
        training_usage_add(
            run_id=resident.row.pk,
            attempt=rows.values_list("num_usages", flat=True)[0],
            adapter=resident.row.adapter_name,
            base_model=self._base.name,
            trained_tokens=resident.tokens,
            device=self._child.device[:64],
            is_gpu=self._child.device != "cpu",
            seconds=resident.seconds,
        )
        resident.tokens, resident.seconds = 0, 0.0


#: Settings that a state and the client that loads it have in common.
_SHAPE = ("rank", "alpha", "target_modules")


def _expiry(call: Call) -> dt.datetime | None:
    seconds = call.said["ttl_seconds"]
    return None if seconds is None else timezone.now() + dt.timedelta(seconds=seconds)


def _is_store(error: Exception) -> bool:
    return isinstance(error, storage.STORAGE_ERRORS)


def _publish(row: TrainingClient, folder: Path, *, is_named: bool) -> AdapterVersion:
    """Upload and check a version, and wait until it is ready. Raises ApiError, CallFailed."""
    paths = [folder / name for name in ADAPTER_FILES]
    source = AdapterVersion.Source.TRAINING if is_named else AdapterVersion.Source.CHECKPOINT
    version = adapter_services.adapter_version_create(
        name=row.adapter_name,
        files={path.name: path.stat().st_size for path in paths},
        base_model_name=row.base_model.name,
        source=source,
    )
    version = adapter_services.adapter_version_upload_files(
        version=version, config_path=paths[0], tensors_path=paths[1]
    )
    until = time.monotonic() + _READY_S
    while version.status not in (Status.READY, Status.RETIRED):
        if version.status == Status.REJECTED:
            reasons = "; ".join(f"{each['field']}: {each['message']}" for each in version.reasons)
            raise CallFailed(f"The adapter was rejected: {reasons}")
        if time.monotonic() > until:
            raise Unavailable("The adapter's check takes too long.")
        time.sleep(0.2)
        version.refresh_from_db()
    return version
