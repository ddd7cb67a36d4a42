"""Access to the console's pages: who may open one, and for which tenant it acts.

Every page of a signed-in person goes through `member_page`: it finds the person's tenant, enters
its scope, asks for the permission, and turns errors into pages. `member_call` does so for an async
view that a script calls. `account_page` is for a person's own account.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django_htmx.middleware import HtmxDetails

from controlplane.errors import ApiError, NotFound, PermissionDenied, require
from controlplane.infra.web.request_lines import line_of, note
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.auth import (
    SESSION_TENANT_KEY,
    Permission,
    Principal,
    authorize,
    session_principal,
)
from controlplane.tenants.models import Membership, Role, Tenant, User
from controlplane.tenants.roles import PERMISSIONS
from controlplane.tenants.second_factor import SecondFactorRequired


def _allows(permission: Permission) -> property:
    return property(lambda member: member.may(permission))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A signed-in person acting in one tenant."""

    user: User
    tenant: Tenant
    role: Role
    membership: Membership | None
    principal: Principal
    #: All tenants that the person may switch to, this one included.
    tenants: tuple[Tenant, ...]

    def may(self, permission: Permission) -> bool:
        return permission in self.principal.permissions

    @property
    def grantable_roles(self) -> list[Role]:
        """Return the roles that they may grant: nobody grants more than they have."""
        return [role for role in Role if PERMISSIONS[role] <= self.principal.permissions]

    can_infer = _allows(Permission.INFER)
    can_upload = _allows(Permission.ADAPTERS_WRITE)
    can_train = _allows(Permission.TRAINING_WRITE)
    can_manage_keys = _allows(Permission.KEYS_MANAGE)
    can_manage_members = _allows(Permission.MEMBERS_MANAGE)
    can_manage_limits = _allows(Permission.LIMITS_MANAGE)
    can_manage_webhooks = _allows(Permission.WEBHOOKS_MANAGE)
    can_read_audit = _allows(Permission.AUDIT_READ)
    can_read_usage = _allows(Permission.USAGE_READ)
    can_read_requests = _allows(Permission.REQUESTS_READ)
    can_read_words = _allows(Permission.REQUESTS_CONTENT)
    can_manage_tenant = _allows(Permission.TENANT_MANAGE)


class ConsoleRequest(HttpRequest):
    """The request that `member_page` passes to a view."""

    user: User  # type: ignore[assignment]
    htmx: HtmxDetails
    member: Member


class AccountRequest(HttpRequest):
    """The request that `account_page` passes to a view."""

    user: User  # type: ignore[assignment]
    member: Member | None
    #: The tenant that the person can enter once they have a second factor.
    second_factor_for: Tenant | None


Page = Callable[..., HttpResponse]
Call = Callable[[HttpRequest, Principal], Coroutine[Any, Any, HttpResponseBase]]


def member_page(view: Page | None = None, *, permission: Permission = Permission.READ) -> Any:
    """Run a view in the scope of the signed-in person's tenant, for roles with the permission.

    Others are redirected to sign in. Another tenant's object is a 404, like a missing one.
    """
    if view is None:
        return functools.partial(member_page, permission=permission)

    @functools.wraps(view)
    def page(request: ConsoleRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _to_sign_in(request)
        try:
            member = _find_member(request)
        except SecondFactorRequired:
            return _elsewhere(request, reverse("console:security"))
        except PermissionDenied as error:
            return _no_tenant(request, error.message)
        if member is None:
            return _no_tenant(request, "")
        request.member = member
        note(request, **member.principal.log_fields)
        with tenant_scope(member.tenant.id):
            return _run(view, request, args, kwargs, permission)

    return page


def member_call(
    view: Call, *, permission: Permission
) -> Callable[[HttpRequest], Coroutine[Any, Any, HttpResponseBase]]:
    """Run an async view for the signed-in person, if their role has the permission now.

    It enters no scope, and holds no database connection while the view waits. Errors are JSON.
    """

    @functools.wraps(view)
    async def call(request: HttpRequest) -> HttpResponseBase:
        try:
            principal = await query_in_thread(lambda: _find_principal(request))
            if principal is None:
                return _to_sign_in(request)
            note(request, **principal.log_fields)
            authorize(principal, permission)
            return await view(request, principal)
        except ApiError as error:
            if (line := line_of(request)) is not None:
                line.code = error.code
            return error.response()

    return call


def _find_principal(request: HttpRequest) -> Principal | None:
    """Return the signed-in person; None if there is none. Raises PermissionDenied."""
    if not request.user.is_authenticated:
        return None
    principal = session_principal(request)
    if principal is None:
        raise PermissionDenied("You do not belong to this tenant any more.", code="no_tenant")
    return principal


def account_page(view: Page) -> Page:
    """Run a view of the signed-in person's own account; it needs no tenant.

    `request.member` is None when the person cannot enter a tenant now.
    """

    @functools.wraps(view)
    def page(request: AccountRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _to_sign_in(request)
        request.second_factor_for = None
        try:
            request.member = _find_member(request)
        except PermissionDenied as error:
            request.member = None
            if isinstance(error, SecondFactorRequired):
                request.second_factor_for = error.tenant
        return view(request, *args, **kwargs)

    return page


def tenants_of(user: User) -> tuple[Tenant, ...]:
    """Return the active tenants that a person belongs to, by name."""
    with all_tenants(reason="find the tenants that a signed-in person may switch to"):
        return tuple(
            Tenant.objects.filter(
                id__in=user.memberships.values("tenant_id"), status=Tenant.Status.ACTIVE
            ).order_by("name")
        )


def choose_tenant(request: HttpRequest, tenant_id: str) -> None:
    """Switch the session to another tenant of the person. Raises NotFound if it is not theirs."""
    assert isinstance(request.user, User)
    chosen = next((t for t in tenants_of(request.user) if str(t.id) == tenant_id), None)
    chosen = require(chosen, "There is no such tenant.")
    request.session[SESSION_TENANT_KEY] = str(chosen.id)


def _find_member(request: HttpRequest) -> Member | None:
    principal = session_principal(request)
    if principal is None and request.session.pop(SESSION_TENANT_KEY, None) is not None:
        # The membership in the chosen tenant has ended; the person may belong to another.
        principal = session_principal(request)
    if principal is None:
        return None
    assert isinstance(request.user, User)
    return Member(
        user=request.user,
        tenant=principal.tenant,
        role=principal.role,
        membership=principal.membership,
        principal=principal,
        tenants=tenants_of(request.user),
    )


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
    permission: Permission,
) -> HttpResponse:
    try:
        authorize(request.member.principal, permission)
        if any("\0" in str(value) for value in kwargs.values()):
            raise Http404  # no row can have this name, and PostgreSQL cannot look it up
        return view(request, *args, **kwargs)
    except Http404:
        error: ApiError = NotFound("There is no such page.")
    except ApiError as raised:
        error = raised
    if request.accepts("text/html"):
        return render(request, "console/error.html", {"error": error}, status=error.status)
    return JsonResponse(error.body(), status=error.status, headers=error.headers())


def _to_sign_in(request: HttpRequest) -> HttpResponse:
    query = urlencode({"next": request.get_full_path()})
    return _elsewhere(request, settings.LOGIN_URL, query)


def _elsewhere(request: HttpRequest, path: str, query: str = "") -> HttpResponse:
    if request.headers.get("HX-Request"):
        # A whole page must not replace a fragment: redirect the whole window.
        return HttpResponse(status=204, headers={"HX-Redirect": path})
    return redirect(f"{path}?{query}" if query else path)
