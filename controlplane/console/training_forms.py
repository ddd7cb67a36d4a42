"""The forms of training: a dataset's rows, a run and a schedule."""

from __future__ import annotations

import zoneinfo
from typing import Any

from django import forms

from controlplane.adapters.models import BaseModel, is_serving
from controlplane.console.forms import choices
from controlplane.tenants.models import slug_validator
from controlplane.training.models import Dataset, Schedule


class DatasetForm(forms.Form):
    name = forms.CharField(
        label="Name",
        max_length=63,
        validators=[slug_validator],
        help_text="If the name exists, later runs use the new version.",
        widget=forms.TextInput(attrs={"placeholder": "invoices-2026", "autocomplete": "off"}),
    )
    file = forms.FileField(
        label="JSONL file",
        help_text='One chat per line: {"messages": [{"role": "user", "content": "…"}, …]}. Of more '
        "than 32 MiB: lorikeet datasets upload.",
        widget=forms.FileInput(attrs={"accept": ".jsonl,.json,application/jsonl"}),
    )
    append = forms.BooleanField(
        label="Add to the rows that it has", required=False, help_text="Else they are replaced."
    )


class TrainForm(forms.Form):
    """Starts a training run of an existing or a new adapter."""

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
    epochs = forms.FloatField(required=False, help_text="How often to read the whole dataset.")
    rank = forms.IntegerField(
        required=False, help_text="A larger rank learns more and answers more slowly."
    )
    learning_rate = forms.FloatField(label="Learning rate", required=False)
    max_length = forms.IntegerField(
        label="Longest row",
        required=False,
        help_text="In tokens, 512 if empty. A longer row is an error.",
    )
    validation_dataset = forms.ModelChoiceField(
        label="Validate with",
        queryset=BaseModel.objects.none(),
        to_field_name="name",
        required=False,
        empty_label="a share of the rows, or nothing",
    )
    validation_share = forms.FloatField(
        label="Share to validate with",
        required=False,
        help_text="0.1: a tenth of the prompts, always the same ones. They are not trained on.",
    )
    eval_steps = forms.IntegerField(
        label="Steps between validations", required=False, help_text="Empty: ten validations."
    )
    patience = forms.IntegerField(
        label="Stop early after",
        required=False,
        help_text="So many validations without a better loss. The best state is kept.",
    )

    #: Fields that are the run's hyperparameters.
    SETTINGS = (
        *("epochs", "rank", "learning_rate", "max_length"),
        *("validation_share", "eval_steps", "patience"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("dataset", "validation_dataset"):
            choices(self, name).queryset = Dataset.objects.order_by("name")
        base_models = BaseModel.objects.filter(is_serving()).order_by("name")
        if len(base_models) > 1:
            choices(self, "base_model").queryset = base_models
        else:
            # There is no choice.
            del self.fields["base_model"]

    def hyperparameters(self) -> dict[str, Any]:
        """Return those that were filled in; the form must be valid."""
        filled = ((name, self.cleaned_data[name]) for name in self.SETTINGS)
        return {name: value for name, value in filled if value is not None}


class ScheduleForm(forms.Form):
    """The schedule of an adapter's retraining, and its dataset."""

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
    skip_unchanged = forms.BooleanField(
        label="Skip it if nothing is new since the last run", required=False, initial=True
    )
    window = forms.CharField(
        label="Begin only between",
        max_length=11,
        required=False,
        help_text="Times of day in the time zone, such as 22:00-06:00. Empty: at any time.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "placeholder": "22:00-06:00"}),
    )
    misfire = forms.ChoiceField(
        label="If it is too late",
        choices=Schedule.Misfire.choices,
        initial=Schedule.Misfire.RUN_ONCE,
        required=False,
    )
    grace_minutes = forms.IntegerField(
        label="Minutes that are not too late",
        min_value=1,
        max_value=10_080,
        initial=60,
        required=False,
    )
    max_runs_per_day = forms.IntegerField(
        label="Runs in 24 hours, at most", min_value=1, max_value=1440, required=False
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choices(self, "dataset").queryset = Dataset.objects.order_by("name")

    def rules(self) -> dict[str, Any]:
        """Return the rules as the service takes them."""
        data = self.cleaned_data
        own = {name: data[name] for name in ("skip_unchanged", "window", "max_runs_per_day")}
        if data["grace_minutes"]:
            own["grace_s"] = 60 * data["grace_minutes"]
        return own | ({"misfire": data["misfire"]} if data["misfire"] else {})

    @staticmethod
    def time_zones() -> list[str]:
        """Return the choices of the time zone field."""
        return sorted(zoneinfo.available_timezones())
