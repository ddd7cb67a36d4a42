"""The console's forms: what can be said about a field before a service is asked."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from typing import Any

from django import forms
from django.utils import timezone

from controlplane.adapters.models import BaseModel
from controlplane.tenants.models import slug_validator
from controlplane.training.models import Dataset


def add_service_error(form: forms.Form, message: str, param: str | None) -> None:
    """Show what a service refused beside the field it names, or above the form.

    A dotted path such as `hyperparameters.rank` names its last part.
    """
    field = (param or "").rpartition(".")[2]
    form.add_error(field if field in form.fields else None, message)


class PasswordForm(forms.Form):
    password = forms.CharField(
        label="Choose a password",
        max_length=1024,
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )


class UploadForm(forms.Form):
    """An adapter's upload; `config` and `tensors` are the lengths of its two files in bytes."""

    name = forms.CharField(
        label="Adapter name",
        max_length=63,
        validators=[slug_validator],
        help_text="Requests name it as their model. An existing name gets a new version.",
        widget=forms.TextInput(
            attrs={"placeholder": "invoices", "autocomplete": "off", "spellcheck": "false"}
        ),
    )
    base_model = forms.ModelChoiceField(
        label="Base model",
        queryset=BaseModel.objects.none(),
        to_field_name="name",
        empty_label=None,
        help_text="The model the adapter was trained on.",
    )
    config = forms.IntegerField(min_value=1)
    tensors = forms.IntegerField(min_value=1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _choices(self, "base_model").queryset = BaseModel.objects.filter(is_active=True).order_by(
            "name"
        )


class KeyForm(forms.Form):
    LIFETIMES = (("never", "Never"), ("30", "After 30 days"), ("90", "After 90 days"))

    name = forms.CharField(
        label="Name",
        max_length=100,
        help_text="Say where it is used, so that you know what stops when you revoke it.",
        widget=forms.TextInput(attrs={"placeholder": "billing-service", "autocomplete": "off"}),
    )
    lifetime = forms.ChoiceField(label="Expires", choices=LIFETIMES)

    def expires_at(self) -> dt.datetime | None:
        """The moment chosen by `lifetime`; the form must be valid."""
        days = self.cleaned_data["lifetime"]
        return None if days == "never" else timezone.now() + dt.timedelta(days=int(days))


class RotateForm(forms.Form):
    GRACES = (("86400", "For a day"), ("604800", "For a week"), ("0", "Not at all"))

    grace = forms.ChoiceField(label="The old key goes on working", choices=GRACES)

    def grace_s(self) -> int:
        """The seconds chosen; the form must be valid."""
        return int(self.cleaned_data["grace"])


class DatasetForm(forms.Form):
    name = forms.CharField(
        label="Name",
        max_length=63,
        validators=[slug_validator],
        help_text="An existing name is replaced for later runs.",
        widget=forms.TextInput(attrs={"placeholder": "invoices-2026", "autocomplete": "off"}),
    )
    file = forms.FileField(
        label="JSONL file",
        help_text='One chat a line: {"messages": [{"role": "user", "content": "…"}, …]}',
        widget=forms.FileInput(attrs={"accept": ".jsonl,.json,application/jsonl"}),
    )


class TrainForm(forms.Form):
    """A training run now, of a known adapter or one to be made."""

    adapter = forms.CharField(
        max_length=63,
        validators=[slug_validator],
        help_text="A new name makes a new adapter.",
        widget=forms.TextInput(
            attrs={"list": "adapters", "autocomplete": "off", "spellcheck": "false"}
        ),
    )
    dataset = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(), to_field_name="name", empty_label=None
    )
    base_model = forms.ModelChoiceField(
        label="Base model",
        queryset=BaseModel.objects.none(),
        to_field_name="name",
        required=False,
        empty_label="The adapter’s own",
        help_text="Needed for a new adapter.",
    )
    epochs = forms.FloatField(required=False, help_text="How often to go through the dataset.")
    rank = forms.IntegerField(required=False, help_text="Larger learns more and answers slower.")
    learning_rate = forms.FloatField(label="Learning rate", required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _choices(self, "dataset").queryset = Dataset.objects.order_by("name")
        base_models = BaseModel.objects.filter(is_active=True).order_by("name")
        if len(base_models) > 1:
            _choices(self, "base_model").queryset = base_models
        else:
            # Nothing to choose.
            del self.fields["base_model"]

    def hyperparameters(self) -> dict[str, Any]:
        """Those that were filled in; the form must be valid."""
        filled = ((name, self.cleaned_data[name]) for name in ("epochs", "rank", "learning_rate"))
        return {name: value for name, value in filled if value is not None}


class ScheduleForm(forms.Form):
    """When an adapter is retrained, and on what."""

    dataset = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(), to_field_name="name", empty_label=None
    )
    cron = forms.CharField(
        label="When",
        max_length=100,
        initial="0 3 * * *",
        help_text="Cron: minute, hour, day of month, month, day of week. 0 3 * * * is 03:00 daily.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    timezone = forms.CharField(
        label="Time zone",
        max_length=64,
        initial="UTC",
        widget=forms.TextInput(attrs={"list": "time-zones", "autocomplete": "off"}),
    )
    is_paused = forms.BooleanField(label="Paused", required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _choices(self, "dataset").queryset = Dataset.objects.order_by("name")

    @staticmethod
    def time_zones() -> list[str]:
        """What the time zone field offers."""
        return sorted(zoneinfo.available_timezones())


def _choices(form: forms.Form, name: str) -> forms.ModelChoiceField[Any]:
    field = form.fields[name]
    assert isinstance(field, forms.ModelChoiceField)
    return field
