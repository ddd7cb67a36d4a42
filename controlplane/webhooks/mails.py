"""Mails about events, to the members who want them."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Collection
from smtplib import SMTPDataError, SMTPException, SMTPRecipientsRefused, SMTPSenderRefused
from typing import Any

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.db import transaction
from django.db.models import F
from django.template.loader import render_to_string
from django.utils import timezone

from controlplane.errors import InvalidRequest
from controlplane.events.audit.services import record
from controlplane.events.outbox.models import CHOOSABLE, EventType, OutboxEvent
from controlplane.infra.metrics import EVENT_MAILS
from controlplane.tenancy.scoping import all_tenants, current_tenant_id, tenant_scope
from controlplane.tenants.models import Membership, Role, Tenant
from controlplane.webhooks.models import EventMail, MailChoice

log = logging.getLogger(__name__)

#: Most mails of a tenant in 24 hours; later events are not mailed.
MAX_PER_DAY = 100
MAX_ATTEMPTS = 5
#: Time limit of a turn.
_TURN_S = 30.0
#: Errors that refuse one mail; others may still be sent.
_REFUSED = (SMTPRecipientsRefused, SMTPSenderRefused, SMTPDataError)
_PAUSE = dt.timedelta(minutes=5)
_MAILS = 50
#: A run's error may quote a row of its dataset.
_NOT_MAILED = ("error",)

_QUIET = {EventType.VERSION_PROMOTED, EventType.TRAINING_RUN_SUCCEEDED}
_USUAL = frozenset(CHOOSABLE) - _QUIET
#: Default events of members by role.
DEFAULTS: dict[Role, Collection[str]] = {
    Role.OWNER: _USUAL,
    Role.ADMIN: _USUAL,
    Role.DEVELOPER: _USUAL - {EventType.BUDGET_REACHED},
    Role.VIEWER: frozenset(),
    Role.BILLING: frozenset({EventType.BUDGET_REACHED}),
}


class ServerAway(Exception):
    """Raised when the mail server does not answer."""


def chosen_types(membership: Membership) -> list[str]:
    """Return the events that a member gets by mail."""
    choice = MailChoice.objects.filter(membership=membership).first()
    wanted = DEFAULTS[Role(membership.role)] if choice is None else choice.event_types
    return [type.value for type in CHOOSABLE if type in wanted]


@transaction.atomic
def mail_choice_set(*, membership: Membership, event_types: Collection[str]) -> None:
    """Set which events a member gets by mail. Raises InvalidRequest."""
    if any(name not in CHOOSABLE for name in event_types):
        raise InvalidRequest(f"Choose some of: {', '.join(CHOOSABLE)}.", param="event_types")
    before = chosen_types(membership)
    wanted = [type.value for type in CHOOSABLE if type in event_types]
    MailChoice.objects.update_or_create(membership=membership, defaults={"event_types": wanted})
    changed = {"event_mails": before}, {"event_mails": wanted}
    record("changed", membership, before=changed[0], after=changed[1])


def mails_make(event: OutboxEvent, now: dt.datetime) -> None:
    """Make the mails of an event of the tenant in scope, as far as the day's number allows."""
    people = _recipients(EventType(event.type))
    day = EventMail.objects.filter(created_at__gte=now - dt.timedelta(days=1))
    room = max(0, MAX_PER_DAY - day.count()) if people else 0
    if dropped := len(people) - room:
        if dropped > 0:
            EVENT_MAILS.labels("dropped").inc(dropped)
            log.warning("too many mails of a tenant", extra={"event_id": event.public_id})
    mails = [EventMail(event=event, user_id=user, next_attempt_at=now) for user in people[:room]]
    EventMail.objects.bulk_create(mails)


def _recipients(type: EventType) -> list[Any]:
    members = Membership.objects.filter(user__is_active=True).order_by("created_at")
    if type == EventType.WEBHOOK_TEST:
        return []
    if type == EventType.WEBHOOK_DISABLED:  # people who can repair it must know
        return [member.user_id for member in members.filter(role=Role.OWNER)]
    choices = dict(MailChoice.objects.values_list("membership_id", "event_types"))
    return [
        member.user_id
        for member in members
        if type in choices.get(member.pk, DEFAULTS[Role(member.role)])
    ]


def mails_send() -> int:
    """Send what is due, of all tenants, the oldest first. -> the number of sent mails.

    Raises ServerAway; the rest waits for the next turn.
    """
    ends_at = time.monotonic() + _TURN_S
    with all_tenants(reason="the due mails of all tenants are sent"):
        # Mails of suspended tenants wait until these are active again.
        due = EventMail.objects.filter(
            next_attempt_at__lte=timezone.now(), tenant__status=Tenant.Status.ACTIVE
        )
        found = list(due.order_by("next_attempt_at").values_list("tenant_id", "pk")[:_MAILS])
    if not found:
        return 0
    sent, connection = 0, get_connection()
    try:
        connection.open()
        for tenant_id, mail_id in found:
            if time.monotonic() >= ends_at:
                break
            with tenant_scope(tenant_id):
                sent += _send(mail_id, connection)
    except (SMTPException, OSError) as error:
        EVENT_MAILS.labels("failed").inc()
        log.warning("the mail server does not answer: %r", error)
        raise ServerAway from error
    finally:
        connection.close()
    return sent


def _send(mail_id: Any, connection: Any) -> bool:
    """Send a mail. -> whether the server took it. Raises when the server does not answer."""
    now = timezone.now()
    mine = EventMail.objects.filter(pk=mail_id, next_attempt_at__lte=now)
    if not mine.update(next_attempt_at=now + _PAUSE, attempts=F("attempts") + 1):
        return False  # another process has it
    mail = EventMail.objects.select_related("event", "user").get(pk=mail_id)
    if not Membership.objects.filter(user=mail.user_id, user__is_active=True).exists():
        EventMail.objects.filter(pk=mail_id).update(next_attempt_at=None)
        return False  # the member has left
    tenant = Tenant.objects.get(pk=current_tenant_id())
    try:
        _message(mail, tenant, connection).send()
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, _REFUSED):
            raise
        EVENT_MAILS.labels("failed").inc()
        log.warning("an event's mail was refused: %r", error)
        if mail.attempts >= MAX_ATTEMPTS:
            EventMail.objects.filter(pk=mail_id).update(next_attempt_at=None)
        return False
    EVENT_MAILS.labels("sent").inc()
    EventMail.objects.filter(pk=mail_id).update(next_attempt_at=None, sent_at=now)
    return True


def _message(mail: EventMail, tenant: Tenant, connection: Any) -> EmailMessage:
    event = mail.event
    name = " ".join(tenant.name.split())
    context = {
        "event": event,
        "label": EventType(event.type).label,
        "facts": _facts(event.data),
        "tenant": name,
        "base_url": settings.BASE_URL,
    }
    return EmailMessage(
        f"[Lorikeet] {name}: {_title(event)}",
        render_to_string("webhooks/event_mail.txt", context),
        to=[mail.user.email],
        connection=connection,
    )


def _title(event: OutboxEvent) -> str:
    label, adapter = EventType(event.type).label, event.data.get("adapter")
    return f"{adapter}: {label}" if adapter else label


def _facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the event's data in words, for a mail of plain text."""
    facts = []
    for name, value in data.items():
        if name in _NOT_MAILED:
            continue
        if isinstance(value, list):
            value = "; ".join(
                f"{item['field']}: {item['message']}" if isinstance(item, dict) else str(item)
                for item in value
            )
        if value not in (None, "", {}):
            facts.append((name.replace("_", " "), " ".join(str(value).split())))
    return facts
