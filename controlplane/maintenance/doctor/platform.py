"""Check the platform's own parts: models, workers, processes, the pepper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings

from contract.adapters.base_model import NotABaseModel
from controlplane.adapters.base_model_folder import configured_base_model
from controlplane.adapters.models import BaseModel, is_serving
from controlplane.celery import app
from controlplane.infra.health import liveness
from controlplane.maintenance.doctor.examination import Finding, failure, ok, warning
from controlplane.maintenance.pepper import pepper_status
from controlplane.queue.workers import workers

_MIN_SECRET = 32
#: Silence after which a process counts as dead.
_SILENT_S = 90.0
#: What can be done about a kind of `engine.stats.Precision.kinds`.
_PRECISION_OF = {
    "attention": "of the attention's matrices: try another LORIKEET_BASE_PRECISION or checkpoint",
    "mlp": "of the MLP's matrices: try another LORIKEET_BASE_PRECISION or checkpoint",
    "kv": "of keys and values: try LORIKEET_KV_PRECISION=auto",
}
#: The services of docker-compose.yml that take each of Celery's queues.
_QUEUES = {"ingest": "celery", "ops": "celery", "train": "trainer"}


def base_models() -> Iterator[Finding]:
    """Check that base models are registered, the configured folder's among them."""
    registered = {model.name: model for model in BaseModel.objects.filter(is_serving())}
    if not registered:
        yield failure(
            "no base model is registered",
            "run `manage.py base_model_add FOLDER` (in Compose the service `model` does)",
        )
    else:
        yield ok(f"registered: {', '.join(sorted(registered))}")
    try:
        folder = configured_base_model()
    except NotABaseModel as error:
        yield failure(f"LORIKEET_BASE_MODEL: {error}", "set the folder of a Hugging Face model")
        return
    if folder is None:
        return
    model = registered.get(folder.name)
    if model is None or model.revision != folder.revision:
        yield failure(
            f"{folder.path} is {folder.name} in revision {folder.revision[:12]}, which is not the "
            "registered one",
            f"run `manage.py base_model_add {folder.path}`",
        )
    else:
        yield ok(f"{folder.path} is {folder.name}")


def pool() -> Iterator[Finding]:
    """Check that each base model has a worker in this pool."""
    found = workers()
    ready = [worker.heartbeat for worker in found if worker.is_ready]
    loading = {w.heartbeat.base_model for w in found if w.is_alive and w.heartbeat.loading}
    for model in BaseModel.objects.filter(is_serving()).order_by("name"):
        name = model.name
        of_it = [beat for beat in ready if beat.base_model == name and not beat.draining]
        if of_it:
            yield ok(f"{name} in pool {settings.POOL}: {', '.join(w.worker_id for w in of_it)}")
        elif name in loading:
            yield warning(f"{name} in pool {settings.POOL}: a worker is loading it", "wait")
        else:
            yield failure(
                f"no worker of the pool {settings.POOL} serves {name}",
                "start one (`docker compose up worker`), and read the last lines of its log: it "
                "ends with status 2 and a reason when it has no GPU or its folder is no model",
            )


def precision() -> Iterator[Finding]:
    """Check what quantisation changes in the answers of this pool's workers."""
    most = settings.PRECISION_MAX_KL
    for worker in workers():
        beat = worker.heartbeat
        found = beat.precision or {}
        kinds = found.get("kinds", {})
        if not worker.is_alive or "all" not in kinds:
            continue
        parts = "; ".join(
            f"{kind} KL {each['kl']:g}, top-1 {each['agreement']:.1%}, "
            f"logit error {each['logit_error']:g}"
            for kind, each in kinds.items()
        )
        said = (
            f"{beat.worker_id}, {beat.base_model} in {found['weights']}, KV {found['kv']}, beside "
            f"{found['compared_with']}: {parts}"
        )
        if kinds["all"]["kl"] <= most:
            yield ok(said)
            continue
        worst = max((kind for kind in kinds if kind != "all"), key=lambda kind: kinds[kind]["kl"])
        yield warning(
            f"{said}; LORIKEET_PRECISION_MAX_KL is {most:g}",
            f"most of it is {_PRECISION_OF[worst]}",
        )


def processes() -> Iterator[Finding]:
    """Check that the processes without a port have shown themselves lately."""
    for name, service in (
        ("accountant", "accountant"),
        ("batch_runner", "batch-runner"),
        ("beat", "beat"),
    ):
        silent_s = liveness.silent_s(name)
        if silent_s is None or silent_s > _SILENT_S:
            since = "for a day" if silent_s is None else f"for {silent_s:.0f} s"
            yield failure(f"{service} has not shown itself {since}", f"see the log of {service}")
        else:
            yield ok(f"{service} lives")


def celery() -> Iterator[Finding]:
    """Check that a Celery worker listens to each queue."""
    answers: dict[str, Any] = app.control.inspect(timeout=1.5).active_queues() or {}
    taken = {queue["name"] for queues in answers.values() for queue in queues}
    for queue, service in _QUEUES.items():
        if queue in taken:
            yield ok(f"the queue {queue} is taken")
        else:
            what = {
                "ingest": "adapters stay unchecked",
                "ops": "nothing is tidied up, no schedule fires",
                "train": "no training run begins",
            }[queue]
            yield failure(f"nobody takes Celery's queue {queue}: {what}", f"start {service}")


def pepper() -> Iterator[Finding]:
    """Check that the pepper is the one of stored values."""
    if not hasattr(settings, "API_KEY_PEPPER"):
        yield failure(
            "LORIKEET_KEY_PEPPER is not set",
            "run this where the web process runs (docker compose exec web python manage.py doctor)",
        )
        return
    status = pepper_status()
    if status.unreadable:
        yield failure(
            f"LORIKEET_KEY_PEPPER is not the pepper of {status.unreadable} stored keys or secrets",
            "set the pepper that the installation had, or add it to LORIKEET_ACCEPTED_PEPPERS",
        )
    elif status.accepted_peppers and status.needs_accepted == 0:
        yield warning(
            "no stored key needs LORIKEET_ACCEPTED_PEPPERS",
            "a day after the change of the pepper, empty it (docs/backup.md)",
        )
    else:
        yield ok(f"the pepper is right; {status.needs_accepted} values need an accepted one")
    for name, value in (
        ("LORIKEET_KEY_PEPPER", settings.API_KEY_PEPPER),
        ("LORIKEET_SECRET_KEY", settings.SECRET_KEY),
    ):
        if len(value) < _MIN_SECRET:
            yield warning(
                f"{name} is shorter than {_MIN_SECRET} characters",
                "use `openssl rand -hex 32`; docs/backup.md says how to change the pepper",
            )
    if settings.SECRET_KEY == settings.API_KEY_PEPPER:
        yield warning("LORIKEET_SECRET_KEY is the pepper, too", "give it a value of its own")
