"""The origin of a change: who makes it, and from where."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import sys
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from celery import current_task
from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponseBase

from controlplane.events.audit.models import AuditEvent
from controlplane.infra.web.request_lines import RequestLine, line_of
from controlplane.tenancy.middleware import Middleware

ActorType = AuditEvent.ActorType

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    actor_type: ActorType
    actor_id: str
    actor_name: str = ""
    ip: str | None = None
    request_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    request: HttpRequest
    request_id: str


_current: ContextVar[_Request | None] = ContextVar("audit_request", default=None)


def current_origin() -> Origin:
    """Return the caller of the current request; outside requests the running task or command."""
    current = _current.get()
    if current is None:
        return Origin(actor_type=ActorType.SYSTEM, actor_id=_program()[:200])
    actor_type, actor_id, name = _caller(getattr(current.request, "user", None))
    return Origin(
        actor_type=actor_type,
        actor_id=actor_id,
        actor_name=name[:320],
        ip=_address(current.request),
        request_id=current.request_id,
    )


class AuditOriginMiddleware(Middleware):
    """Middleware that sets the request for `current_origin`, with the client's or our id.

    Writes the request's log line, too.
    """

    @contextlib.contextmanager
    def context(self, request: HttpRequest) -> Iterator[None]:
        with RequestLine(request, f"req_{uuid.uuid4().hex}") as line:
            sent = line.client_request_id or ""
            request_id = sent if _REQUEST_ID.fullmatch(sent) else line.request_id
            with request_origin(request, request_id):
                yield

    def finished(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if (line := line_of(request)) is not None:
            line.end_with(response)
        return response


@contextlib.contextmanager
def request_origin(request: HttpRequest, request_id: str) -> Iterator[None]:
    """Attribute the changes inside the block to the request's `user`: a person or a principal."""
    token = _current.set(_Request(request, request_id))
    try:
        yield
    finally:
        _current.reset(token)


def _caller(user: Any) -> tuple[ActorType, str, str]:
    """Return type, id and name of a person, or of a principal: DRF makes it the request's user."""
    service_key = getattr(user, "service_key", None)
    if service_key is not None:
        return ActorType.SERVICE_KEY, service_key.public_id, service_key.name
    api_key = getattr(user, "api_key", None)
    if api_key is not None:
        return ActorType.API_KEY, api_key.public_id, api_key.name
    person = user if isinstance(user, get_user_model()) else getattr(user, "user", None)
    if person is not None:
        return ActorType.USER, str(person.pk), person.email
    return ActorType.ANONYMOUS, "", ""


def _address(request: HttpRequest) -> str | None:
    try:
        return str(ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")))
    except ValueError:  # a Unix socket has no address
        return None


def _program() -> str:
    if current_task:
        return f"task {current_task.name}"
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
