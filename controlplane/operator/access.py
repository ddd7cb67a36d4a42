"""The base of all views of /ops/v1: authentication, scopes, and the platform's audit trail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.db import transaction
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import PermissionDenied
from controlplane.events.audit.services import record_named
from controlplane.gateway.rest.views import RowAPIView
from controlplane.management.base import ManagementAPIView
from controlplane.operator.service_keys import auth
from controlplane.operator.service_keys.auth import Operator
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants import idempotency
from controlplane.tenants.models import OperatorIdempotencyRecord, User
from controlplane.tenants.second_factor import is_kept_out

_READS = ("GET", "HEAD", "OPTIONS")


class ServiceKeyAuthentication(BaseAuthentication):
    """Authentication by a service key. Only a request without a header tries the session."""

    def authenticate(self, request: Request) -> tuple[Operator, Operator] | None:
        header = request.headers.get("Authorization")
        if header is None:
            return None
        operator = auth.authenticate(header, request.META.get("REMOTE_ADDR") or "")
        return operator, operator

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class OperatorSessionAuthentication(SessionAuthentication):
    """Authentication by an operator's session; writes need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[User, Operator] | None:  # type: ignore[override]
        user = request._request.user
        if not isinstance(user, User) or not user.is_active:
            return None
        if not (user.is_staff and user.is_superuser):
            raise PermissionDenied("Only operators can do this.")
        if is_kept_out(user):
            raise PermissionDenied(
                "Operators need a second factor. Set one up in the console, under Security.",
                code="second_factor_required",
            )
        self.enforce_csrf(request)
        return user, Operator(user=user)

    def authenticate_header(self, request: Request) -> str:
        return "Session"


class _ServiceKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "controlplane.operator.access.ServiceKeyAuthentication"
    name = "serviceKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An operator's service key."}


class _OperatorScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "controlplane.operator.access.OperatorSessionAuthentication"
    name = "operatorSession"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": "sessionid", "description": "Staff's."}


class OperatorAccess(RowAPIView):
    """A view for operators. A service key needs one of the scopes that the view names.

    A view that names none is for people only.
    """

    authentication_classes = (ServiceKeyAuthentication, OperatorSessionAuthentication)
    #: Any of these allows reading.
    readers: ClassVar[Iterable[Scope]] = ()
    #: Any of these allows all other methods.
    writers: ClassVar[Iterable[Scope]] = ()
    #: The slug of the tenant that the request changes, for the platform's audit trail.
    acted_for: str | None = None

    @property
    def operator(self) -> Operator:
        """Return the operator who asks. Raises NotAuthenticated."""
        operator = self.request.auth
        if not isinstance(operator, Operator):
            raise NotAuthenticated
        return operator

    def check_scope(self, request: Request) -> None:
        """Raise PermissionDenied for a service key without the scope for the request's method."""
        method = (request.method or "").upper()
        self.operator.check(*(self.readers if method in _READS else self.writers))

    def finalize_response(
        self, request: Request, response: Any, *args: Any, **kwargs: Any
    ) -> Response:
        answer = super().finalize_response(request, response, *args, **kwargs)
        is_done = 200 <= answer.status_code < 300 and idempotency.REPLAYED_HEADER not in answer
        if self.acted_for is not None and is_done and request.method not in _READS:
            with all_tenants(reason="the platform's own trail"), transaction.atomic():
                record_named(
                    "acted_for",
                    "tenant",
                    self.acted_for,
                    after={"call": f"{request.method} {request.path}"[:500]},
                )
        return answer


class OperatorAPIView(OperatorAccess, ManagementAPIView):
    """A view across tenants."""

    def check_permissions(self, request: Request) -> None:
        super().check_permissions(request)
        self.check_scope(request)
        self._scope.enter_context(all_tenants(reason="the operator's API"))
        self.acted_for = self.kwargs.get("slug")
        self.begin_attempt(request, self.operator.label, OperatorIdempotencyRecord)
