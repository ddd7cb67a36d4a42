"""Who may open a page of the console, and for which tenant it acts.

Every page of a signed-in person goes through `member_page`: it finds the person's tenant, enters
its scope, asks for the permission, and turns what goes wrong into a page. `public_page` is for the
pages before that. Both add the security headers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils.http import urlencode
from django_htmx.middleware import HtmxDetails

from controlplane.errors import ApiError, NotFound, PermissionDenied
from controlplane.scoping import all_tenants, tenant_scope
from controlplane.tenants.auth import (
    PERMISSIONS,
    SESSION_TENANT_KEY,
    Permission,
    Principal,
    authorize,
    session_principal,
)
from controlplane.tenants.models import Membership, Role, Tenant, User


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A signed-in person acting in one tenant."""

    user: User
    tenant: Tenant
    role: Role
    membership: Membership | None
    principal: Principal
    #: Every tenant the person may switch to, this one included.
    tenants: tuple[Tenant, ...]

    @property
    def can_upload(self) -> bool:
        return Permission.ADAPTERS_WRITE in PERMISSIONS[self.role]

    @property
    def can_train(self) -> bool:
        return Permission.TRAINING_WRITE in PERMISSIONS[self.role]

    @property
    def can_manage_keys(self) -> bool:
        return Permission.KEYS_MANAGE in PERMISSIONS[self.role]


class ConsoleRequest(HttpRequest):
    """What `member_page` hands to a view."""

    user: User  # type: ignore[assignment]
    htmx: HtmxDetails
    member: Member


Page = Callable[..., HttpResponse]


def public_page(view: Page) -> Page:
    """A page that anybody may open."""

    @functools.wraps(view)
    def page(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return _secured(view(request, *args, **kwargs))

    return page


def member_page(view: Page | None = None, *, permission: Permission = Permission.READ) -> Any:
    """A page inside the scope of the signed-in person's tenant, for roles with the permission.

    Nobody signed in is sent to sign in. Another tenant's object is a 404, like a missing one.
    """
    if view is None:
        return functools.partial(member_page, permission=permission)

    @functools.wraps(view)
    def page(request: ConsoleRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _secured(_to_sign_in(request))
        try:
            principal = _find_principal(request)
        except PermissionDenied as error:
            return _secured(_no_tenant(request, error.message))
        if principal is None:
            return _secured(_no_tenant(request, ""))
        request.member = Member(
            user=request.user,
            tenant=principal.tenant,
            role=principal.role,
            membership=principal.membership,
            principal=principal,
            tenants=tenants_of(request.user),
        )
        with tenant_scope(principal.tenant.id):
            return _secured(_run(view, request, args, kwargs, principal, permission))

    return page


def tenants_of(user: User) -> tuple[Tenant, ...]:
    """The active tenants that a person belongs to, by name."""
    with all_tenants(reason="which tenants a signed-in person may switch to"):
        return tuple(
            Tenant.objects.filter(
                id__in=user.memberships.values("tenant_id"), status=Tenant.Status.ACTIVE
            ).order_by("name")
        )


def choose_tenant(request: HttpRequest, tenant_id: str) -> None:
    """Act in another of the person's tenants from now on. Raises NotFound when it is not theirs."""
    assert isinstance(request.user, User)
    chosen = next((t for t in tenants_of(request.user) if str(t.id) == tenant_id), None)
    if chosen is None:
        raise NotFound("There is no such tenant.")
    request.session[SESSION_TENANT_KEY] = str(chosen.id)


def _find_principal(request: HttpRequest) -> Principal | None:
    principal = session_principal(request)
    if principal is None and request.session.pop(SESSION_TENANT_KEY, None) is not None:
        # The membership behind the choice has ended; there may be another.
        principal = session_principal(request)
    return principal


def _no_tenant(request: HttpRequest, reason: str) -> HttpResponse:
    assert isinstance(request.user, User)
    if request.user.is_staff and not reason:
        return redirect("admin:index")
    context = {"reason": reason, "tenants": tenants_of(request.user)}
    return render(request, "console/no_tenant.html", context, status=403)


def _run(
    view: Page,
    request: ConsoleRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    principal: Principal,
    permission: Permission,
) -> HttpResponse:
    try:
        authorize(principal, permission)
        return view(request, *args, **kwargs)
    except Http404:
        error: ApiError = NotFound("There is no such page.")
    except ApiError as raised:
        error = raised
    if request.accepts("text/html"):
        return render(request, "console/error.html", {"error": error}, status=error.status)
    return JsonResponse(error.body(), status=error.status, headers=error.headers())


def _to_sign_in(request: HttpRequest) -> HttpResponse:
    target = f"{settings.LOGIN_URL}?{urlencode({'next': request.get_full_path()})}"
    if request.headers.get("HX-Request"):
        # A fragment must not be replaced by the sign-in page: the whole window goes there.
        return HttpResponse(status=204, headers={"HX-Redirect": settings.LOGIN_URL})
    return redirect(target)


@functools.cache
def _security_headers() -> dict[str, str]:
    storage = urlsplit(settings.S3_PUBLIC_ENDPOINT_URL)
    policy = {
        "default-src": "'self'",
        # Adapter files go from the browser straight to the object store.
        "connect-src": f"'self' {storage.scheme}://{storage.netloc}",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "object-src": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "same-origin",
        # Pages hold a tenant's data; a shared computer's back button must not show them.
        "Cache-Control": "no-store",
    }


def _secured(response: HttpResponse) -> HttpResponse:
    for name, value in _security_headers().items():
        response.headers[name] = value
    return response
