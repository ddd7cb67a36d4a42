"""Celery's tasks of webhooks and event mails; queue `ops`."""

from __future__ import annotations

import logging
import time
import uuid

from celery import shared_task
from kombu.exceptions import OperationalError

from controlplane.infra.redis_client import redis_client
from controlplane.webhooks import delivery, fan_out, mails

log = logging.getLogger(__name__)

#: Time in which a turn begins calls; then other tasks of the queue run.
TURN_S = 5.0
#: Time for fanning out events before the first call, so that no tenant delays others.
_FAN_OUT_S = 1.0
#: Lock of the one process that delivers, so that a worker's other children stay free.
_TURN_KEY = "webhooks:turn"
_AGAIN_KEY = "webhooks:again"
#: Time of the lock, longer than a turn and its last call.
_TURN_LEASE_S = 60
#: Lock of the one process that mails, kept while a server does not answer.
_MAILS_KEY = "webhooks:mails"
_MAILS_LEASE_S = 60


def wake() -> None:
    """Have new events delivered now. If that fails, beat's next tick does it."""
    try:
        webhooks_deliver.delay()
    except OperationalError:
        log.warning("events wait for the next tick: the broker does not answer")


@shared_task(ignore_result=True)
def webhooks_deliver() -> None:
    """Make the deliveries and mails of new events, and do the deliveries that are due."""
    token = uuid.uuid4().hex
    with redis_client() as client:
        if not client.set(_TURN_KEY, token, nx=True, ex=_TURN_LEASE_S):
            # The process with the turn may have looked already, so look again when it ends. The
            # key ends before the task comes, which may still find the turn taken.
            if client.set(_AGAIN_KEY, "1", nx=True, px=900):
                webhooks_deliver.apply_async(countdown=1)
            return
        try:
            is_more = turn()
        finally:
            if client.get(_TURN_KEY) == token.encode():
                client.delete(_TURN_KEY)
    if is_more:
        wake()


def turn(for_s: float = TURN_S) -> bool:
    """Do one turn. -> whether more may be due."""
    ends_at = time.monotonic() + min(for_s, _FAN_OUT_S)
    while fan_out.events_fan_out() and time.monotonic() < ends_at:
        pass
    event_mails_send.delay()
    return delivery.deliver_due(for_s, _look)


def _look() -> None:
    """Take up events that came during deliveries."""
    if fan_out.events_fan_out():
        event_mails_send.delay()


@shared_task(ignore_result=True)
def event_mails_send() -> None:
    """Send mails that are due. A server that hangs blocks one task in a minute."""
    token = uuid.uuid4().hex
    with redis_client() as client:
        if not client.set(_MAILS_KEY, token, nx=True, ex=_MAILS_LEASE_S):
            return
        try:
            mails.mails_send()
        except mails.ServerAway:
            return
        if client.get(_MAILS_KEY) == token.encode():
            client.delete(_MAILS_KEY)


@shared_task(ignore_result=True)
def events_forget() -> None:
    """Delete old events, with their deliveries and mails."""
    fan_out.events_forget()
