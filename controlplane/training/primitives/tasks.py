"""Celery's task that trains clients, in the queue `train`: one base's at a time."""

from __future__ import annotations

import logging
import uuid

from celery import shared_task
from django.conf import settings

from controlplane.adapters.base_model_folder import local_base_model
from controlplane.adapters.models import BaseModel
from controlplane.infra.temp_folders import scratch_folder
from controlplane.training.last_lines import last_lines
from controlplane.training.primitives import calls
from controlplane.training.primitives.child import Child, ChildLost
from controlplane.training.primitives.services import TRAIN_TASK
from controlplane.training.primitives.trainer import Trainer
from controlplane.training.runs import picking
from controlplane.training.runs.execution import send_waiting

log = logging.getLogger(__name__)


@shared_task(name=TRAIN_TASK)
def clients_train(base_id: str) -> None:
    """Do the calls of a base's training clients, unless another trainer does."""
    base = BaseModel.objects.filter(pk=base_id).first()
    found = None if base is None else local_base_model(base.name)
    if base is None or found is None or found.revision != base.revision:
        log.error("this trainer lacks a training client's base", extra={"base_model_id": base_id})
        return
    boot = uuid.uuid4().hex
    if not calls.waiting(base.pk):
        return  # the trainer before did what this message was sent for
    if picking.window_opens_at() is not None or not calls.lease_take(base.pk, boot):
        return
    with scratch_folder("clients-") as folder:
        stderr = folder / "stderr.log"
        share = settings.TRAINER_GPU_SHARE
        child = Child(found.path, share or 1.0, settings.TRAINER_ENVIRONMENT, stderr)
        try:
            child.wait(lambda: calls.lease_renew(base.pk, boot))
            Trainer(base, child, folder, boot).run()
        except ChildLost:
            log.error("the clients' trainer ended", extra={"last_lines": last_lines(stderr)})
        finally:
            child.close()
            calls.lease_drop(base.pk, boot)
    send_waiting()
