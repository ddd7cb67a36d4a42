"""/api/v1/tenant, members, invites and service-accounts."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.tenants import people, services
from controlplane.tenants.auth import Permission
from controlplane.tenants.invite_mail import invite_send, invite_url
from controlplane.tenants.models import Invite, Membership, Role, ServiceAccount, Tenant
from controlplane.tenants.origins import MAX_ORIGIN_CHARS, MAX_ORIGINS

_ORIGINS_HELP = (
    "Origins of pages that may call /v1 from a browser, as `https://app.example.com`. Empty: none."
)


class TenantSerializer(serializers.ModelSerializer[Tenant]):
    object = serializers.CharField(default="tenant", read_only=True)
    allowed_origins = serializers.ListField(child=serializers.CharField(), help_text=_ORIGINS_HELP)

    class Meta:
        model = Tenant
        fields = (
            "id", "object", "slug", "name", "status", "requires_second_factor",
            "allowed_origins", "created_at",
        )  # fmt: skip


class TenantUpdateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200, required=False)
    requires_second_factor = serializers.BooleanField(
        required=False,
        help_text="Whether members must sign in with a second factor. Keys are not affected.",
    )
    allowed_origins = serializers.ListField(
        child=serializers.CharField(max_length=MAX_ORIGIN_CHARS),
        max_length=MAX_ORIGINS,
        required=False,
        help_text=_ORIGINS_HELP,
    )


class MemberSerializer(serializers.ModelSerializer[Membership]):
    object = serializers.CharField(default="member", read_only=True)
    user = serializers.UUIDField(source="user_id")
    email = serializers.EmailField(source="user.email")

    class Meta:
        model = Membership
        fields = ("id", "object", "user", "email", "role", "created_at")


class RoleSerializer(StrictSerializer):
    role = ChoiceField(Role.choices)


class InviteSerializer(serializers.ModelSerializer[Invite]):
    object = serializers.CharField(default="invite", read_only=True)
    status = serializers.ChoiceField(Invite.Status.choices)

    class Meta:
        model = Invite
        fields = (
            "id", "object", "email", "role", "status", "created_at", "expires_at",
            "accepted_at", "revoked_at",
        )  # fmt: skip


class InviteCreateSerializer(StrictSerializer):
    email = serializers.EmailField(max_length=254)
    role = ChoiceField(Role.choices)
    send_mail = serializers.BooleanField(
        required=False, default=False, help_text="Whether to send the url to the person by mail."
    )


class InviteCreatedSerializer(InviteSerializer):
    url = serializers.URLField(help_text="Where the person accepts it. It is shown only this time.")

    class Meta(InviteSerializer.Meta):
        fields = (*InviteSerializer.Meta.fields, "url")  # type: ignore[assignment]


class ServiceAccountSerializer(serializers.ModelSerializer[ServiceAccount]):
    object = serializers.CharField(default="service_account", read_only=True)

    class Meta:
        model = ServiceAccount
        fields = ("id", "object", "name", "description", "role", "created_at")


class ServiceAccountCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63)
    role = ChoiceField(Role.choices, required=False, default=Role.DEVELOPER)
    description = serializers.CharField(
        max_length=500, required=False, default="", allow_blank=True
    )


class ServiceAccountUpdateSerializer(StrictSerializer):
    role = ChoiceField(Role.choices, required=False)
    description = serializers.CharField(max_length=500, required=False, allow_blank=True)


class TenantView(TenantAPIView):
    permissions: ClassVar = {"PATCH": Permission.TENANT_MANAGE}

    @extend_schema(responses=TenantSerializer)
    def get(self, request: Request) -> Response:
        """Return the caller's tenant."""
        return Response(TenantSerializer(self.principal.tenant).data)

    @extend_schema(request=TenantUpdateSerializer, responses=TenantSerializer)
    def patch(self, request: Request) -> Response:
        """Change the tenant's name, its second-factor rule or its origins. Its slug stays."""
        body = TenantUpdateSerializer.parsed(request)
        tenant = services.tenant_update(tenant=self.principal.tenant, **body)
        return Response(TenantSerializer(tenant).data)


class MembersView(TenantAPIView):
    @extend_schema("members_list", PAGE_PARAMETERS, responses=page_of(MemberSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's members, newest first."""
        return page(request, Membership.objects.select_related("user"), MemberSerializer)


class MemberView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PATCH", "DELETE"), Permission.MEMBERS_MANAGE)

    @extend_schema(responses=MemberSerializer)
    def get(self, request: Request, member_id: uuid.UUID) -> Response:
        return Response(MemberSerializer(people.member_get(member_id=member_id)).data)

    @extend_schema(request=RoleSerializer, responses=MemberSerializer)
    def patch(self, request: Request, member_id: uuid.UUID) -> Response:
        """Change a member's role. Only an owner can make or remove an owner."""
        people.member_get(member_id=member_id)
        body = RoleSerializer.parsed(request)
        member = people.member_role_set(
            by=self.principal, member_id=member_id, role=Role(body["role"])
        )
        return Response(MemberSerializer(member).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, member_id: uuid.UUID) -> Response:
        """Remove a member and revoke their keys. The last owner or admin cannot be removed."""
        people.member_remove(by=self.principal, member_id=member_id)
        return Response(status=204)


class InvitesView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.MEMBERS_MANAGE}

    @extend_schema("invites_list", PAGE_PARAMETERS, responses=page_of(InviteSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's invites, newest first, without their tokens."""
        return page(request, Invite.objects.all(), InviteSerializer)

    @extend_schema(request=InviteCreateSerializer, responses={201: InviteCreatedSerializer})
    def post(self, request: Request) -> Response:
        """Invite a person by the answer's `url`, which works once, for seven days."""
        body = InviteCreateSerializer.parsed(request)
        invite, token = people.invite_create(
            by=self.principal, email=body["email"], role=Role(body["role"])
        )
        if body["send_mail"]:
            tenant = self.principal.tenant
            # After the commit: with an Idempotency-Key the invite may be rolled back.
            transaction.on_commit(lambda: invite_send(invite=invite, tenant=tenant, token=token))
        return Response({**InviteSerializer(invite).data, "url": invite_url(token)}, status=201)


class InviteView(TenantAPIView):
    @extend_schema(responses=InviteSerializer)
    def get(self, request: Request, invite_id: uuid.UUID) -> Response:
        return Response(InviteSerializer(people.invite_get(invite_id=invite_id)).data)


class InviteRevokeView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.MEMBERS_MANAGE}

    @extend_schema(request=None, responses=InviteSerializer)
    def post(self, request: Request, invite_id: uuid.UUID) -> Response:
        """Revoke an invite; its url stops working."""
        return Response(InviteSerializer(people.invite_revoke(invite_id=invite_id)).data)


class ServiceAccountsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.MEMBERS_MANAGE}

    @extend_schema(
        "service_accounts_list", PAGE_PARAMETERS, responses=page_of(ServiceAccountSerializer)
    )
    def get(self, request: Request) -> Response:
        """List the tenant's service accounts, newest first."""
        return page(request, ServiceAccount.objects.all(), ServiceAccountSerializer)

    @extend_schema(
        request=ServiceAccountCreateSerializer, responses={201: ServiceAccountSerializer}
    )
    def post(self, request: Request) -> Response:
        """Make a service account: its keys outlive the person who made them."""
        body = ServiceAccountCreateSerializer.parsed(request)
        account = people.service_account_create(
            by=self.principal,
            name=body["name"],
            role=Role(body["role"]),
            description=body["description"],
        )
        return Response(ServiceAccountSerializer(account).data, status=201)


class ServiceAccountView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PATCH", "DELETE"), Permission.MEMBERS_MANAGE)

    @extend_schema(responses=ServiceAccountSerializer)
    def get(self, request: Request, account_id: uuid.UUID) -> Response:
        account = people.service_account_get(account_id=account_id)
        return Response(ServiceAccountSerializer(account).data)

    @extend_schema(request=ServiceAccountUpdateSerializer, responses=ServiceAccountSerializer)
    def patch(self, request: Request, account_id: uuid.UUID) -> Response:
        """Change the description, or the role, which restricts all its keys."""
        account = people.service_account_get(account_id=account_id)
        body: dict[str, Any] = ServiceAccountUpdateSerializer.parsed(request)
        account = people.service_account_update(
            by=self.principal,
            account_id=account_id,
            role=Role(body.get("role", account.role)),
            description=body.get("description", account.description),
        )
        return Response(ServiceAccountSerializer(account).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, account_id: uuid.UUID) -> Response:
        """Delete a service account and revoke its keys."""
        people.service_account_delete(by=self.principal, account_id=account_id)
        return Response(status=204)
