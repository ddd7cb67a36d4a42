"""The console's forms: they check fields before a service is called."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest
from django.utils import timezone

from controlplane.adapters.models import BaseModel
from controlplane.errors import ApiError, NotFound
from controlplane.requestlog.models import LogPolicy
from controlplane.requestlog.services import MAX_CONTENT_DAYS, MAX_METADATA_DAYS
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import ApiKey, Role, ServiceAccount, slug_validator
from controlplane.tenants.permissions import DEFAULT_SCOPES, Permission
from controlplane.usage.limits.models import Budget, RateLimit

if TYPE_CHECKING:
    from controlplane.console.access import Member

MAX_INT, MAX_BIGINT = 2**31 - 1, 2**63 - 1
#: Each permission in words.
SCOPE_LABELS: dict[Permission, str] = {
    Permission.READ: "see what there is",
    Permission.INFER: "send requests to models",
    Permission.ADAPTERS_WRITE: "upload adapters",
    Permission.TRAINING_WRITE: "train adapters",
    Permission.FILES_READ: "read files",
    Permission.FILES_WRITE: "upload files",
    Permission.BATCHES_READ: "see batches",
    Permission.BATCHES_WRITE: "start batches",
    Permission.USAGE_READ: "read usage",
    Permission.REQUESTS_READ: "read the list of requests",
    Permission.REQUESTS_CONTENT: "read prompts and answers",
    Permission.AUDIT_READ: "read the audit trail",
    Permission.LIMITS_MANAGE: "set limits and budgets",
    Permission.WEBHOOKS_MANAGE: "manage webhooks",
    Permission.KEYS_MANAGE: "manage keys",
    Permission.MEMBERS_MANAGE: "manage members",
    Permission.TENANT_MANAGE: "change the tenant",
}


class ErrorsShown:
    """A block of a view whose ApiError is shown, so that the code after the block runs.

    target  a form: beside the field that the error names; the request: on the next page, unless the
            error is NotFound, which is a page of its own
    """

    def __init__(self, target: forms.Form | HttpRequest) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, ApiError):
            return False
        if isinstance(self._target, forms.Form):
            add_service_error(self._target, error.message, error.param)
        elif isinstance(error, NotFound):
            return False
        else:
            messages.error(self._target, error.message)
        return True


def add_service_error(form: forms.Form, message: str, param: str | None) -> None:
    """Show a service's error beside the field that it names, or above the form.

    The field of a dotted path such as `hyperparameters.rank` is its last part.
    """
    field = (param or "").rpartition(".")[2]
    form.add_error(field if field in form.fields else None, message)


class PasswordForm(forms.Form):
    password = forms.CharField(
        label="Password",
        max_length=1024,
        help_text="Choose one, or enter yours if this address already has an account.",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )


class Lines(forms.CharField):
    """Several values, separated by lines or commas; the cleaned value is a tuple."""

    def __init__(self, **options: Any) -> None:
        attrs = {"rows": 3, "spellcheck": "false", "class": "mono", **options.pop("attrs", {})}
        super().__init__(
            required=False, max_length=10_000, widget=forms.Textarea(attrs=attrs), **options
        )

    def clean(self, value: Any) -> tuple[str, ...]:
        return tuple(str(super().clean(value)).replace(",", " ").split())

    def prepare_value(self, value: Any) -> Any:
        return value if isinstance(value, str) else "\n".join(value or ())


class KeyRulesForm(forms.Form):
    """A key's rules; scopes that the person lacks cannot be chosen."""

    name = forms.CharField(
        label="Name",
        max_length=100,
        help_text="Name the place where it is used, so that you know what stops if you revoke it.",
        widget=forms.TextInput(attrs={"placeholder": "billing-service", "autocomplete": "off"}),
    )
    scopes = forms.MultipleChoiceField(
        label="It may", widget=forms.CheckboxSelectMultiple, help_text=""
    )
    allowed_models = Lines(
        label="Only these models", help_text="“invoices” also allows invoices@3. Empty: all."
    )
    allowed_ips = Lines(
        label="Only from these addresses", help_text="192.0.2.7 or 192.0.2.0/24. Empty: all."
    )

    def __init__(self, *args: Any, member: Member, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mine = [scope for scope in Permission if member.may(scope)]
        field = self.fields["scopes"]
        assert isinstance(field, forms.MultipleChoiceField)
        field.choices = [(scope.value, SCOPE_LABELS.get(scope, scope.value)) for scope in mine]
        field.initial = [scope for scope in DEFAULT_SCOPES if scope in mine]

    def rules(self) -> KeyRules:
        """Return the rules; the form must be valid."""
        return KeyRules(
            scopes=tuple(self.cleaned_data["scopes"]),
            allowed_models=self.cleaned_data["allowed_models"],
            allowed_ips=self.cleaned_data["allowed_ips"],
        )


class KeyForm(KeyRulesForm):
    LIFETIMES = (("never", "Never"), ("30", "After 30 days"), ("90", "After 90 days"))
    field_order = ("name", "owner", "lifetime", "environment", "scopes")

    owner = forms.ModelChoiceField(
        label="It belongs to",
        queryset=BaseModel.objects.none(),
        required=False,
        empty_label="Me",
        help_text="A service account’s key still works when you leave the tenant.",
    )
    lifetime = forms.ChoiceField(label="Expires", choices=LIFETIMES)
    environment = forms.ChoiceField(choices=ApiKey.Environment.choices)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choices(self, "owner").queryset = ServiceAccount.objects.order_by("name")

    def expires_at(self) -> dt.datetime | None:
        """Return the moment chosen by `lifetime`; the form must be valid."""
        days = self.cleaned_data["lifetime"]
        return None if days == "never" else timezone.now() + dt.timedelta(days=int(days))


class KeyEditForm(KeyRulesForm):
    expires_at = forms.DateTimeField(
        label="Expires (UTC)",
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )


class RotateForm(forms.Form):
    GRACES = (("86400", "For a day"), ("604800", "For a week"), ("0", "Not at all"))

    grace = forms.ChoiceField(label="The old key still works", choices=GRACES)

    def grace_s(self) -> int:
        """Return the chosen seconds; the form must be valid."""
        return int(self.cleaned_data["grace"])


class _RoleForm(forms.Form):
    """A form with the roles that the person may grant."""

    role = forms.ChoiceField()

    def __init__(self, *args: Any, roles: Sequence[Role], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["role"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [(role.value, role.label) for role in roles]
        field.initial = field.initial or Role.DEVELOPER


class RoleForm(_RoleForm):
    pass


class InviteForm(_RoleForm):
    email = forms.EmailField(
        label="E-mail address", widget=forms.EmailInput(attrs={"autocomplete": "off"})
    )
    field_order = ("email", "role")


class ServiceAccountForm(_RoleForm):
    name = forms.CharField(
        max_length=63,
        validators=[slug_validator],
        widget=forms.TextInput(attrs={"placeholder": "billing-service", "autocomplete": "off"}),
    )
    description = forms.CharField(max_length=500, required=False)
    field_order = ("name", "role", "description")

    def __init__(self, *args: Any, is_new: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not is_new:
            del self.fields["name"]


class TenantForm(forms.Form):
    name = forms.CharField(max_length=200)
    requires_second_factor = forms.BooleanField(
        label="Members must have a second factor",
        required=False,
        help_text="Members without one must set it up before they can enter. Keys still work.",
    )
    allowed_origins = Lines(
        label="Origins of pages that may call the API",
        help_text="For apps in a browser: one per line, as https://app.example.com. Empty: none. "
        "Everybody who opens such a page can read its key: make a separate key with few scopes.",
    )


class LogPolicyForm(forms.Form):
    """The policy of the request log."""

    content = forms.ChoiceField(
        label="Prompts and answers",
        choices=[
            (LogPolicy.Content.OFF, "are not stored"),
            (LogPolicy.Content.ON_REQUEST, "are stored for requests with store: true"),
            (LogPolicy.Content.ALL, "are stored, except for requests with store: false"),
        ],
        help_text="They are encrypted; owners and admins can read them. If you choose “are not "
        "stored”, stored ones become unreadable at once, which cannot be undone.",
    )
    content_days = forms.IntegerField(
        label="Days to keep them", min_value=1, max_value=MAX_CONTENT_DAYS
    )
    metadata_days = forms.IntegerField(
        label="Days to keep the log", min_value=1, max_value=MAX_METADATA_DAYS
    )


class _LimitedForm(forms.Form):
    """A limit of one key, or of all keys."""

    api_key = forms.ModelChoiceField(
        label="Key", queryset=BaseModel.objects.none(), required=False, empty_label="All keys"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys = ApiKey.objects.filter(revoked_at=None).order_by("name")
        choices(self, "api_key").queryset = keys


def _at_least(number: int, most: int, **options: Any) -> forms.IntegerField:
    return forms.IntegerField(required=False, min_value=number, max_value=most, **options)


class LimitForm(_LimitedForm):
    model = forms.CharField(
        required=False,
        max_length=200,
        help_text="“invoices” applies to all its versions. Empty: all models.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    requests_per_minute = _at_least(1, MAX_INT, label="Requests per minute")
    tokens_per_minute = _at_least(1, MAX_INT, label="Tokens per minute")
    max_concurrent = _at_least(1, MAX_INT, label="Requests at a time")
    max_waiting = _at_least(1, MAX_INT, label="Requests waiting")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if not self.errors and all(data.get(name) is None for name in RateLimit.RATES):
            self.add_error(None, "Enter at least one limit.")
        return data


class BudgetForm(_LimitedForm):
    period = forms.ChoiceField(choices=Budget.Period.choices)
    soft_limit = _at_least(
        0, MAX_BIGINT, label="Soft limit", help_text="Above it responses have a warning header."
    )
    hard_limit = _at_least(
        0, MAX_BIGINT, label="Hard limit", help_text="Above it requests are refused; 0 refuses all."
    )


class AuditForm(forms.Form):
    """A search in the audit trail; empty fields are ignored."""

    action = forms.CharField(required=False, max_length=64)
    actor = forms.CharField(label="Who", required=False, max_length=320)
    resource_id = forms.CharField(label="What", required=False, max_length=64)
    since = forms.DateField(
        label="From", required=False, widget=forms.DateInput(attrs={"type": "date"})
    )
    until = forms.DateField(
        label="To", required=False, widget=forms.DateInput(attrs={"type": "date"})
    )


def choices(form: forms.Form, name: str) -> forms.ModelChoiceField[Any]:
    field = form.fields[name]
    assert isinstance(field, forms.ModelChoiceField)
    return field
