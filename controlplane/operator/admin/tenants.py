"""The operator's pages for tenants, people and keys. No page shows a secret."""

from __future__ import annotations

from typing import Any, ClassVar

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from allauth.usersessions.models import UserSession
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import Group
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from unfold.admin import TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from controlplane.operator.admin.base import AuditedAdmin, ReadOnlyAdmin
from controlplane.operator.admin.lists import TENANT
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.email_addresses import address_set
from controlplane.tenants.models import ApiKey, Membership, Tenant, User
from controlplane.tenants.services import SETTABLE, api_key_revoke, tenant_status_set
from controlplane.tenants.signin_audit import second_factors_remove

#: Number of people whose addresses begin with the search term.
_MAX_PEOPLE = 100

# Memberships have roles; Django's groups are not used.
admin.site.unregister(Group)
# Allauth's pages would show personal data that nobody else needs to see.
for _model in (EmailAddress, Authenticator, SocialAccount, SocialApp, SocialToken, UserSession):
    admin.site.unregister(_model)


class MembershipInline(TabularInline):
    model = Membership
    extra = 0
    autocomplete_fields = ("user",)
    fields = ("user", "role")
    per_page = 20
    ordering = ("pk",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Membership]:
        rows: QuerySet[Membership] = super().get_queryset(request)
        return rows.select_related("user", "tenant")  # each row is titled by both

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Name the field for screen readers: the label is only in the table's header."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            field.widget.attrs["aria-label"] = str(field.label or db_field.verbose_name)
        return field


@admin.register(Tenant)
class TenantAdmin(AuditedAdmin):
    list_display = ("slug", "name", "status", "created_at")
    list_filter = ("status",)
    search_tenants = False
    search_help_text = "The beginning of a slug, or a part of a name"
    ordering = sortable_by = ("slug",)
    inlines = (MembershipInline,)
    actions = ("suspend", "reactivate")

    def get_readonly_fields(self, request: HttpRequest, obj: Tenant | None = None) -> Any:
        # A slug is in URLs and logs, so it never changes.
        if obj is None:
            return ("created_at",)
        is_going = obj.status == Tenant.Status.DELETING
        return ("slug", "created_at", "deletion", *(["status"] if is_going else []))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        rows: QuerySet[Tenant] = super().get_queryset(request)
        return rows.exclude(status=Tenant.Status.DELETED)

    def formfield_for_choice_field(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name == "status":  # only a deletion sets the others
            kwargs["choices"] = [(status.value, status.label) for status in SETTABLE]
        return super().formfield_for_choice_field(db_field, request, **kwargs)

    @admin.display(description="Deletion")
    def deletion(self, tenant: Tenant) -> str:
        link = reverse("admin:deletion_tenantdeletion_ask", args=[tenant.pk])
        is_going = tenant.status == Tenant.Status.DELETING
        label = "Being deleted…" if is_going else "Delete this tenant…"
        return format_html('<a href="{}">{}</a>', link, label)

    def search_q(self, term: str) -> Q:
        # Tenants are thousands at most: a name is found without an index.
        return Q(slug__startswith=term.lower()) | Q(name__icontains=term)

    def has_delete_permission(self, request: HttpRequest, obj: Tenant | None = None) -> bool:
        # Django would delete only the rows; `deletion` deletes objects and caches, too.
        return False

    @admin.action(description="Suspend: refuse their keys and sign-ins")
    def suspend(self, request: HttpRequest, queryset: QuerySet[Tenant]) -> None:
        self._move(request, queryset, Tenant.Status.SUSPENDED)

    @admin.action(description="Reactivate")
    def reactivate(self, request: HttpRequest, queryset: QuerySet[Tenant]) -> None:
        self._move(request, queryset, Tenant.Status.ACTIVE)

    def _move(
        self, request: HttpRequest, queryset: QuerySet[Tenant], status: Tenant.Status
    ) -> None:
        going = (Tenant.Status.DELETING, Tenant.Status.DELETED)
        others = list(queryset.exclude(status__in=(status, *going)))
        for tenant in others:
            tenant_status_set(tenant=tenant, status=status)
        self.message_user(
            request, f"{len(others)} tenants are now {status.value}.", messages.SUCCESS
        )


class PersonCreationForm(UserCreationForm):
    """Django's form with an e-mail address instead of a user name."""

    class Meta:
        model = User
        fields = ("email",)

    def clean_email(self) -> str:
        # Addresses are stored in lower case, as sign-in expects.
        return str(self.cleaned_data["email"]).lower()


class PersonChangeForm(UserChangeForm):
    clean_email = PersonCreationForm.clean_email


@admin.register(User)
class PersonAdmin(UserAdmin, AuditedAdmin):  # type: ignore[type-arg, misc]
    form = PersonChangeForm
    add_form = PersonCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("email", "first_name", "last_name", "is_staff", "is_active", "last_login")
    list_filter = ("is_staff", "is_active")
    search_help_text = "The beginning of an address"
    ordering = sortable_by = ("email",)
    filter_horizontal = ()
    readonly_fields = ("last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("email", "password", "first_name", "last_name")}),
        ("Access", {"fields": ("is_active", "is_staff", "is_superuser")}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "usable_password", "password1", "password2")}),)
    actions = ("remove_second_factors",)

    def search_q(self, term: str) -> Q:
        return Q(email__startswith=term.lower())

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if "email" in form.changed_data:
            # The operator vouches for the new address; the old one is no longer valid.
            address_set(obj, is_proven=True)

    @admin.action(description="Remove second factors (of people who lost them and their codes)")
    def remove_second_factors(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        for user in queryset:
            second_factors_remove(user)
        self.message_user(
            request, f"{len(queryset)} people now sign in by password only.", messages.SUCCESS
        )


@admin.register(Membership)
class MembershipAdmin(AuditedAdmin):
    list_display = ("user", "tenant", "role", "created_at")
    list_filter = ("role", TENANT)
    search_help_text = "The beginning of an address, or of a tenant's slug"
    autocomplete_fields = ("user", "tenant")
    list_select_related = ("user", "tenant")

    def search_q(self, term: str) -> Q:
        people = User.objects.filter(email__startswith=term.lower()).order_by("email")
        found = list(people.values_list("pk", flat=True)[:_MAX_PEOPLE])
        return super().search_q(term) | Q(user_id__in=found)


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    list_display = ("name", "ending", "tenant", "created_at", "last_used_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), TENANT)
    search_prefixes = ("public_id",)
    search_name = "name"
    search_help_text = "A key's id, a tenant, or tenant/name"
    list_select_related = ("tenant",)
    fields: ClassVar[tuple[str, ...]] = (
        "tenant",
        "name",
        "public_id",
        "ending",
        "created_by",
        "created_at",
        "expires_at",
        "last_used_at",
        "revoked_at",
    )
    actions = ("revoke",)

    @admin.display(description="Ends in")
    def ending(self, api_key: ApiKey) -> str:
        return f"…{api_key.last4}"

    @admin.action(description="Revoke these keys and the keys that they made")
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        keys = list(queryset.filter(revoked_at=None).values_list("tenant_id", "public_id"))
        for tenant_id, public_id in keys:
            with tenant_scope(tenant_id):
                api_key_revoke(public_id=public_id)
        self.message_user(request, f"{len(keys)} keys are revoked.", messages.SUCCESS)
