"""Send invites by mail."""

from __future__ import annotations

import logging
from smtplib import SMTPException

from django.conf import settings
from django.core.mail import send_mail
from django.template.loader import render_to_string
from django.urls import reverse

from controlplane.tenants.models import Invite, Tenant

logger = logging.getLogger(__name__)


def invite_url(token: str) -> str:
    """Return the address at which the invite can be accepted, once."""
    return settings.BASE_URL + reverse("console:invite", args=[token])


def invite_send(*, invite: Invite, tenant: Tenant, token: str) -> bool:
    """Send an invite. -> whether the mail server took it; else the inviter must pass it on."""
    context = {"invite": invite, "tenant": tenant, "url": invite_url(token)}
    try:
        send_mail(
            f"[Lorikeet] {' '.join(tenant.name.split())} invites you",
            render_to_string("console/mail/invite.txt", context),
            None,
            [invite.email],
        )
    except (SMTPException, OSError):
        logger.exception("an invite's mail could not be sent")
        return False
    return True
