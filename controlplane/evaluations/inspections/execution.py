"""Inspect versions, one at a time: the doctor's report, then the probe, then the decision.

An inspector takes the next inspection of the next tenant, under a lease with the number of its
attempt: it writes only what that attempt may write. A held version becomes ready when a worker
agrees, and is rejected when it does not. A version that is ready already stays so when they agree;
else it is rejected, unless it is live or an alias names it: then the operators are told.
"""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from contract.adapters import peft_config, safetensors_header
from contract.adapters.inspection import InspectJob
from contract.adapters.peft_config import load_json
from contract.adapters.problems import AdapterProblems
from contract.messages.protocol import ErrorCode, adapter_digest
from controlplane.adapters import ingest, promotion
from controlplane.adapters.base_model_folder import local_base_model
from controlplane.adapters.models import Adapter, AdapterInspection, AdapterVersion
from controlplane.adapters.probing import Facts
from controlplane.aliases.protection import aliases_of
from controlplane.errors import ApiError
from controlplane.evaluations.inspections import probe
from controlplane.evaluations.inspections.child import InspectionFailed, memory_limit, run_inspector
from controlplane.evaluations.inspections.comparison import (
    Verdict,
    compare,
    copy_nats,
    scores_of,
    tolerance_for,
)
from controlplane.evaluations.inspections.sweep import claimable
from controlplane.events.audit.services import record
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra import storage
from controlplane.infra.metrics import PROBES
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.row_lease import RowLease
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training.runs.lost_runs import runs_conclude
from controlplane.usage.limits import turns
from controlplane.usage.limits.models import Turn

log = logging.getLogger(__name__)

Status = AdapterInspection.Status

#: Time of a lease: the limits of child and probe, and of the steps around them.
_LEASE = dt.timedelta(minutes=8)
#: Pause after an attempt without a result, doubled after each further one, `hold` included.
_TRY_AGAIN, _TRY_LATEST = dt.timedelta(minutes=5), dt.timedelta(days=1)
#: Number of workers and devices that are stored with a probe.
_MAX_NAMED = 8
#: Codes of a worker's errors about the adapter, which count as a mismatch.
_REFUSALS = (
    ErrorCode.ADAPTER_INCOMPATIBLE,
    ErrorCode.ADAPTER_QUARANTINED,
    ErrorCode.GIVEN_UP,
)


class NotRun(Exception):
    """Raised when the probe has no result about the adapter; the message says why."""


class Mismatch(Exception):
    """Raised when a worker serves something else than was checked; the message is for its owner."""

    def __init__(self, message: str, **found: Any) -> None:
        super().__init__(message)
        self.found = found


class InspectionLease(RowLease[AdapterInspection]):
    """An inspector's lease on its inspection."""

    fence_field = "attempts"


def inspect_next() -> bool:
    """Inspect the next version. -> False when none waits."""
    inspection = _claim()
    if inspection is None:
        return False
    with tenant_scope(inspection.tenant_id):
        _inspect(inspection)
    return True


def _claim() -> AdapterInspection | None:
    """Take the next inspection of all tenants.

    Those of held versions come first, then those that somebody asked for.
    """
    while True:
        with all_tenants(reason="the next inspection is chosen among all tenants"):
            rows = claimable()
            in_order = (rows.filter(is_held=True), rows.filter(status=Status.WAITING), rows)
            found = (turns.next_of(Turn.Kind.ADAPTER_PROBE, some) for some in in_order)
            row = next((each for each in found if each is not None), None)
        if row is None:
            return None
        with tenant_scope(row.tenant_id), transaction.atomic():
            # By the attempt alone: a condition on the version makes this a query in a query, which
            # PostgreSQL does not repeat after it has waited for another inspector's lease.
            unchanged = AdapterInspection.objects.filter(pk=row.pk, attempts=row.attempts)
            if InspectionLease.take(unchanged.filter(status=row.status), _LEASE):
                turns.taken(Turn.Kind.ADAPTER_PROBE)
                related = ("version__adapter__base_model",)
                return AdapterInspection.objects.select_related(*related).get(pk=row.pk)


def _inspect(inspection: AdapterInspection) -> None:
    version = inspection.version
    fields = {"version_id": str(version.pk), "adapter": version.adapter.name}
    log.info("inspection begins", extra=fields | {"attempt": inspection.attempts})
    try:
        found = _found(inspection)
    except Mismatch as mismatch:
        _decide_against(inspection, str(mismatch), mismatch.found)
    except NotRun as reason:
        _put_off(inspection, str(reason))
    except storage.ObjectMissing:
        _put_off(inspection, "The version's files are not in the object store.")
    except storage.STORAGE_ERRORS:
        _put_off(inspection, "The object store does not answer.")
    except DATABASE_OUTAGE:
        raise
    except Exception:
        log.exception("an inspection failed", extra=fields)
        _put_off(inspection, "The inspector failed: send the operator this version's id.")
    else:
        _decide_for(inspection, found)
    runs_conclude(version)  # at once: a tick would look at them up to half a minute later


def _found(inspection: AdapterInspection) -> dict[str, Any]:
    """Return the fields of an inspection whose worker agrees. Raises NotRun, and Mismatch."""
    version = inspection.version
    base = local_base_model(version.adapter.base_model.name)
    if base is None or base.revision != version.adapter.base_model.revision:
        raise NotRun("The inspector does not have this base model.")
    digest = inspection.facts["digest"] if inspection.facts else version.digest
    with scratch_folder("inspect-") as folder:
        adapter = folder / "adapter"
        adapter.mkdir()
        _download(version, digest, adapter)
        base_bytes = sum(file.stat().st_size for file in base.path.glob("*.safetensors"))
        told = _told(
            InspectJob(
                base_model_dir=base.path,
                adapter_dir=adapter,
                memory_bytes=memory_limit(base_bytes, version.num_bytes),
            ),
            folder,
        )
    if "error" not in told["doctor"]:
        InspectionLease(inspection).rows(*AdapterInspection.OPEN).update(doctor=told["doctor"])
    if "error" in told["reference"]:
        raise NotRun(f"PEFT did not load the adapter: {told['reference']['error']}"[:400])
    return _compared(version, digest, told["reference"])


def _download(version: AdapterVersion, digest: str, folder: Path) -> None:
    """Fetch both files from where workers fetch them. Raises Mismatch if they are others."""
    kept = AdapterVersion(tenant_id=version.tenant_id, digest=digest)
    config = storage.read_bytes(kept.config_key, max_bytes=version.config_num_bytes + 1)
    (folder / peft_config.FILE).write_bytes(config)

    def pieces() -> Any:
        with (folder / safetensors_header.FILE).open("wb") as file:
            for piece in storage.read_pieces(kept.tensors_key, max_bytes=version.num_bytes + 1):
                file.write(piece)
                yield piece

    try:
        parsed = load_json(config, version.config_num_bytes)
    except AdapterProblems:
        parsed = {}
    if adapter_digest(parsed, pieces(), version.adapter.base_model.revision) != digest:
        raise Mismatch("the stored files are not those that were checked")


def _told(job: InspectJob, folder: Path) -> dict[str, Any]:
    try:
        told = run_inspector(job, folder, environment=settings.TRAINER_ENVIRONMENT)
        return {"doctor": dict(told["doctor"]), "reference": dict(told["reference"])}
    except InspectionFailed as error:
        raise NotRun(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise NotRun("The inspector's child printed JSON of the wrong form.") from error


def _compared(version: AdapterVersion, digest: str, reference: dict[str, Any]) -> dict[str, Any]:
    """Return the stored fields of a probe that agrees. Raises NotRun, and Mismatch."""
    prompts = reference["prompts"]
    wanted, wanted_base = scores_of(prompts, "adapter"), scores_of(prompts, "base")
    try:
        asked = [prompt["token_ids"] for prompt in prompts]
        served, base, copy = probe.ask(version, digest, asked)
    except ApiError as error:
        if error.code in _REFUSALS:
            raise Mismatch(f"a worker cannot serve it: {error.message}") from error
        raise NotRun(f"No worker answered: {error.message}") from error
    # Workers compute in fp32 on a CPU, in bf16 on a GPU: `engine.config.EngineConfig.dtype_name`.
    is_cpu = all(device.startswith("cpu") for device in served.devices) and served.devices
    served_dtype = "float32" if is_cpu else "bfloat16"
    verdict = compare(
        reference=wanted,
        served=served.scores,
        base_reference=wanted_base,
        base_served=base.scores,
        tolerance=tolerance_for(reference["dtype"], served_dtype),
        is_quantized=any(
            each[name] in ("fp8", "int4")
            for each in served.precisions
            for name in ("weights", "kv")
        ),
    )
    if verdict.base_problem:
        raise NotRun(f"The worker's base model is not the inspector's: {verdict.base_problem}")
    summary = _summary(verdict, served, reference["dtype"], served_dtype)
    if copy is not None:
        version.copy_nats = round(copy_nats(wanted, served.scores, copy.scores), 5)
        summary["copy_nats"] = version.copy_nats
        if version.is_in_fp8 and copy.device_bytes:
            summary["device_bytes"] = copy.device_bytes
    found = {
        "probe": summary,
        "compared": [
            {
                "token_ids": prompt["token_ids"],
                "peft": wanted.logprobs[number],
                "worker": served.scores.logprobs[number],
                "base": wanted_base.logprobs[number],
            }
            for number, prompt in enumerate(prompts)
        ],
    }
    if verdict.problem:
        raise Mismatch(verdict.problem, **found)
    return found


def _summary(
    verdict: Verdict, served: probe.Served, dtype: str, served_dtype: str
) -> dict[str, Any]:
    return {
        "workers": served.workers[:_MAX_NAMED],
        "devices": served.devices[:_MAX_NAMED],
        "dtype": served_dtype,
        "reference_dtype": dtype,
        "values": verdict.num_values,
        "max_difference": round(verdict.max_difference, 5),
        "base_max_difference": round(verdict.base_max_difference, 5),
        "tolerance": verdict.tolerance.absolute,
        "relative_tolerance": verdict.tolerance.relative,
        "precisions": served.precisions,
        "nats": round(verdict.nats, 5),
        "base_nats": round(verdict.base_nats, 5),
        "strength": None if verdict.strength is None else round(verdict.strength, 3),
        "load_ms": round(served.load_ms, 1),
        **({"device_bytes": served.device_bytes} if served.device_bytes else {}),
    }


def _decide_for(inspection: AdapterInspection, found: dict[str, Any]) -> None:
    version = inspection.version
    with transaction.atomic():
        _lock(version)
        if not _end(inspection, Status.AGREED, "", found):
            return
        nats = found["probe"].get("copy_nats")
        AdapterVersion.objects.filter(pk=version.pk).update(copy_nats=nats)
        if inspection.facts:
            ingest.version_accept(version, Facts(**inspection.facts))
    PROBES.labels("agreed").inc()
    log.info("probe agreed", extra=_log_fields(inspection))


def _decide_against(inspection: AdapterInspection, why: str, found: dict[str, Any]) -> None:
    version = inspection.version
    reason = f"A worker does not compute what PEFT computes: {why}."[:500]
    with transaction.atomic():
        adapter = _lock(version)
        if not _end(inspection, Status.MISMATCH, reason, found):
            return
        version.refresh_from_db(fields=["status", "kept_digest", "digest"])
        # Code that makes a revision with the version takes the adapter's lock, too.
        aliases = aliases_of(Q(version=version))
        is_live = adapter.live_version_id == version.pk
        is_used = is_live or bool(aliases)
        if version.status == AdapterVersion.Status.VALIDATING:
            ingest.version_reject_held(version, reason)
        elif is_used:
            # Its removal may harm callers more than its answers do, so people decide.
            after = {"why": reason, "is_live": is_live, "aliases": aliases}
            record("probe_mismatch", version, after=after)
        else:
            _reject_ready(version, reason)
    if is_used:
        log.error("a live version fails its probe", extra=_log_fields(inspection))
    PROBES.labels("mismatch_live" if is_used else "rejected").inc()
    log.warning("probe mismatch", extra=_log_fields(inspection))


def _lock(version: AdapterVersion) -> Adapter:
    """Lock the adapter, then the version, in the order of all code."""
    adapter = promotion.lock(version.adapter_id)
    AdapterVersion.objects.select_for_update().filter(pk=version.pk).first()
    return adapter


def _reject_ready(version: AdapterVersion, reason: str) -> None:
    """Reject a version that became ready without its probe and that no request can mean now.

    Its files stay for a day: requests that were accepted may still load them.
    """
    reasons = [{"field": "", "message": reason}]
    moved = version.move(
        AdapterVersion.Status.READY,
        AdapterVersion.Status.REJECTED,
        reasons=reasons,
        kept_digest=version.digest,
        digest="",
        is_cleared=False,
    )
    if moved:
        told = {"adapter": version.adapter.name, "version": version.number}
        publish(EventType.VERSION_REJECTED, **told, reasons=reasons)
        record("rejected", version, after={"reasons": reasons})


def _put_off(inspection: AdapterInspection, why: str) -> None:
    """Note why there was no probe; a held version becomes ready, unless the probe is required."""
    is_over = bool(inspection.facts) and settings.PROBE != "require"
    status = Status.WAITING if inspection.facts and not is_over else Status.NOT_RUN
    rows = InspectionLease(inspection).rows(*AdapterInspection.OPEN)
    with transaction.atomic():
        _lock(inspection.version)
        wait = min(_TRY_LATEST, _TRY_AGAIN * 2 ** max(0, min(inspection.attempts - 2, 10)))
        until = timezone.now() + wait
        if not rows.update(status=status, why=why[:500], lease_until=until):
            return
        if is_over:
            ingest.version_accept(inspection.version, Facts(**inspection.facts))
    PROBES.labels("not_run").inc()
    log.warning("probe not run", extra=_log_fields(inspection) | {"why": why})


def _end(inspection: AdapterInspection, status: Status, why: str, found: dict[str, Any]) -> bool:
    """Write the end of an inspection. -> False when it is no longer this inspector's."""
    rows = InspectionLease(inspection).rows(*AdapterInspection.OPEN)
    now = timezone.now()
    ended = rows.update(status=status, why=why, inspected_at=now, lease_until=None, **found)
    return ended == 1


def _log_fields(inspection: AdapterInspection) -> dict[str, Any]:
    version = inspection.version
    return {
        "version_id": str(version.pk),
        "adapter": version.adapter.name,
        "version": version.number,
    }
