"""Send messages for the runs that may begin into the broker's queue `train`.

A message only says that there is work; its receiver trains the next run. So a few messages are as
good as one for each run, and waiting messages are counted before one is sent: many queued runs and
many ticks send no superfluous ones.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import redis
from celery import signature
from django.conf import settings
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from controlplane.infra.metrics import TRAINING_MESSAGES
from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingRun
from controlplane.training.runs import picking

log = logging.getLogger(__name__)

#: The name of the task that trains; its module imports this one.
EXECUTE_TASK = "controlplane.training.tasks.training_run_execute"
QUEUE = "train"
#: Largest number of waiting messages; more than there are trainers.
MAX_WAITING = 64


def run_send(run: TrainingRun) -> None:
    """Send a message for a queued run, unless enough wait. If that fails, a later tick does it."""
    try:
        if num_waiting() < MAX_WAITING:
            _send(run)
    except (OperationalError, RedisError):
        log.warning("a training run could not be sent for yet", extra={"run_id": str(run.pk)})


def runs_send() -> None:
    """Send messages for the runs of all tenants that may begin, unless enough wait."""
    try:
        with all_tenants(reason="the runs to send for are of all tenants"):
            runs = picking.some_that_may_begin(MAX_WAITING)
        for run in runs[num_waiting() :]:
            _send(run)
    except (OperationalError, RedisError) as error:
        log.warning("training runs could not be sent for yet: %r", error)


def _send(run: TrainingRun) -> None:
    signature(EXECUTE_TASK).delay(str(run.tenant_id), str(run.pk))
    TRAINING_MESSAGES.inc()


def num_waiting() -> int:
    """Return the number of messages in the queue. Raises RedisError."""
    return int(_broker(settings.CELERY_BROKER_URL).llen(QUEUE))


@functools.cache
def _broker(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5)
