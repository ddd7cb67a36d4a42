"""Webhooks and their deliveries; and which events a person gets by mail."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import ErrorsShown
from controlplane.events.outbox.models import CHOOSABLE
from controlplane.tenants.auth import Permission
from controlplane.webhooks import mails, services
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint

_SHOWN = 100
_CHOICES = [(type.value, f"{type.value}: {type.label}") for type in CHOOSABLE]


class WebhookForm(forms.Form):
    url = forms.CharField(
        label="URL",
        max_length=2000,
        help_text="https, of a public host. Events are sent there by POST.",
        widget=forms.URLInput(
            attrs={"placeholder": "https://example.com/lorikeet", "autocomplete": "off"}
        ),
    )
    description = forms.CharField(
        label="Description", max_length=services.MAX_DESCRIPTION_CHARS, required=False
    )
    event_types = forms.MultipleChoiceField(
        label="Events", choices=_CHOICES, widget=forms.CheckboxSelectMultiple
    )


class NotificationsForm(forms.Form):
    event_types = forms.MultipleChoiceField(
        label="Events",
        choices=_CHOICES,
        widget=forms.CheckboxSelectMultiple,
        required=False,
    )


@require_safe
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def webhooks(request: ConsoleRequest) -> HttpResponse:
    return render(request, "console/webhooks.html", _context())


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def create_webhook(request: ConsoleRequest) -> HttpResponse:
    """Make a webhook and show its secret, only this time."""
    form = WebhookForm(request.POST)
    if form.is_valid():
        with ErrorsShown(form):
            made, secret = services.webhook_create(**form.cleaned_data)
            return render(request, "console/webhook.html", _page(made) | {"secret": secret})
    return render(request, "console/webhooks.html", _context() | {"form": form}, status=422)


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def webhook(request: ConsoleRequest, webhook_id: uuid.UUID) -> HttpResponse:
    """Show a webhook with its newest deliveries; change it."""
    endpoint = services.webhook_get(webhook_id=webhook_id)
    form = WebhookForm(request.POST) if request.method == "POST" else None
    if form is not None and form.is_valid():
        with ErrorsShown(form):
            services.webhook_update(webhook_id=webhook_id, changes=form.cleaned_data)
            messages.success(request, "The webhook is changed.")
            return redirect("console:webhook", webhook_id)
    context = _page(endpoint, form)
    return render(request, "console/webhook.html", context, status=422 if form else 200)


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def rotate_webhook(request: ConsoleRequest, webhook_id: uuid.UUID) -> HttpResponse:
    """Replace the secret and show it, only this time; the old one signs for a day, too."""
    endpoint, secret = services.webhook_rotate(webhook_id=webhook_id)
    return render(request, "console/webhook.html", _page(endpoint) | {"secret": secret})


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def enable_webhook(request: ConsoleRequest, webhook_id: uuid.UUID) -> HttpResponse:
    """Enable the webhook, or disable it."""
    is_enabled = request.POST.get("is_enabled") == "1"
    services.webhook_update(webhook_id=webhook_id, changes={"is_enabled": is_enabled})
    messages.success(request, f"The webhook is {'enabled' if is_enabled else 'disabled'}.")
    return redirect("console:webhook", webhook_id)


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def test_webhook(request: ConsoleRequest, webhook_id: uuid.UUID) -> HttpResponse:
    with ErrorsShown(request):
        services.webhook_test(webhook_id=webhook_id)
        messages.success(request, "A test event is on its way. Reload the page for its outcome.")
    return redirect("console:webhook", webhook_id)


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def redeliver(
    request: ConsoleRequest, webhook_id: uuid.UUID, delivery_id: uuid.UUID
) -> HttpResponse:
    with ErrorsShown(request):
        services.delivery_redeliver(webhook_id=webhook_id, delivery_id=delivery_id)
        messages.success(request, "The event is on its way again.")
    return redirect("console:webhook", webhook_id)


@require_POST
@member_page(permission=Permission.WEBHOOKS_MANAGE)
def delete_webhook(request: ConsoleRequest, webhook_id: uuid.UUID) -> HttpResponse:
    services.webhook_delete(webhook_id=webhook_id)
    messages.success(request, "The webhook is deleted.")
    return redirect("console:webhooks")


@require_http_methods(["GET", "HEAD", "POST"])
@member_page
def notifications(request: ConsoleRequest) -> HttpResponse:
    """Choose the events that the person gets by mail."""
    membership = request.member.membership
    form = None
    if membership is not None:
        initial = {"event_types": mails.chosen_types(membership)}
        form = NotificationsForm(request.POST or None, initial=initial)
        if request.method == "POST":
            # A form without a chosen event sends no field.
            form = NotificationsForm(request.POST)
            if form.is_valid():
                mails.mail_choice_set(membership=membership, **form.cleaned_data)
                messages.success(request, "Your choice is saved.")
                return redirect("console:notifications")
    status = 422 if form is not None and form.errors else 200
    return render(request, "console/notifications.html", {"form": form}, status=status)


def _context() -> dict[str, Any]:
    initial = {"event_types": [type.value for type in CHOOSABLE]}
    return {
        "webhooks": WebhookEndpoint.objects.order_by("-created_at"),
        "form": WebhookForm(initial=initial),
        "most": services.MAX_ENDPOINTS,
    }


def _page(endpoint: WebhookEndpoint, form: WebhookForm | None = None) -> dict[str, Any]:
    initial = {
        "url": endpoint.url,
        "description": endpoint.description,
        "event_types": endpoint.event_types,
    }
    rows = WebhookDelivery.objects.filter(endpoint=endpoint).select_related("event")
    return {
        "webhook": endpoint,
        "form": form or WebhookForm(initial=initial),
        "deliveries": rows.order_by("-pk")[:_SHOWN],
    }
