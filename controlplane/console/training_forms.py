"""The forms of training: a dataset's rows, a run and a schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

from django import forms

from contract.training.job import METHODS, RANGES, Hyperparameters
from controlplane.adapters.models import BaseModel, is_serving
from controlplane.console.forms import choices
from controlplane.errors import InvalidRequest
from controlplane.tenants.models import slug_validator
from controlplane.training.cron import timezones
from controlplane.training.datasets import sources
from controlplane.training.models import Dataset, Schedule
from controlplane.training.schedules.schedule_rules import window_of


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
        help_text='One chat per line: {"messages": [{"role": "user", "content": "…"}, …]}. Rows of '
        "ShareGPT, Alpaca, Vertex AI, Anthropic, TRL and others are converted, unless something "
        "would be lost. Or a pair of answers per line, for DPO. Of more than 32 MiB: "
        "lorikeet datasets upload.",
        widget=forms.FileInput(attrs={"accept": ".jsonl,.json,application/jsonl"}),
    )
    append = forms.BooleanField(
        label="Add to the rows that it has", required=False, help_text="Else they are replaced."
    )


def _number(name: str, label: str | None = None, help_text: str = "") -> forms.IntegerField:
    """Return the field of a hyperparameter, with the bounds that the trainer has for it."""
    allowed = RANGES[name]
    kind = forms.IntegerField if allowed.is_whole else forms.FloatField
    bounds: dict[str, Any] = {"min_value": allowed.least, "max_value": allowed.most}
    return kind(label=label, required=False, help_text=help_text, **bounds)


#: The names of the methods on the page.
_METHODS = {
    "supervised": "supervised: chats",
    "dpo": "DPO: pairs of answers",
    "reinforcement": "reinforcement: prompts and a grader",
}


class TrainForm(forms.Form):
    """The form that starts a training run of an existing or a new adapter."""

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
    method = forms.ChoiceField(
        choices=[(name, _METHODS[name]) for name in METHODS],
        required=False,
        help_text="DPO takes rows with two answers, and learns to give the better one. "
        "Reinforcement takes prompts, and learns to give answers with a high reward.",
    )
    beta = _number(
        "beta",
        "Beta",
        "Only for DPO, 0.1 if empty, and reinforcement, 0.01: larger keeps nearer to the start.",
    )
    grader = forms.JSONField(
        required=False,
        help_text="Only for reinforcement: JSON, as OpenAI’s graders are written.",
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
    )
    samples = _number("samples", "Answers of a prompt", "Only for reinforcement, 8 if empty.")
    max_tokens = _number(
        "max_tokens", "Longest answer", "Only for reinforcement: in tokens, 256 if empty."
    )
    epochs = _number("epochs", help_text="How often to read the whole dataset.")
    rank = _number("rank", help_text="A larger rank learns more and answers more slowly.")
    learning_rate = _number("learning_rate", "Learning rate")
    max_length = _number(
        "max_length", "Longest row", "In tokens, 512 if empty. A longer row is an error."
    )
    batch_size = _number("batch_size", "Rows of a batch", "8 if empty.")
    gradient_accumulation = _number(
        "gradient_accumulation", "Batches of a step", "More, of fewer rows, take less memory."
    )
    checkpoints = _number(
        "checkpoints", "Checkpoints to keep", "Intermediate adapters, as versions that answer."
    )
    draft_heads = _number(
        "draft_heads", "Draft heads", "Guess tokens ahead, for faster answers. Empty: none."
    )
    skip_thoughts = forms.BooleanField(
        label="Do not learn thoughts",
        required=False,
        help_text="What stands in reasoning_content is then only context.",
    )
    gradient_checkpointing = forms.BooleanField(
        label="Recompute activations",
        required=False,
        help_text="Takes less memory, and about a third longer.",
    )
    validation_dataset = forms.ModelChoiceField(
        label="Validate with",
        queryset=BaseModel.objects.none(),
        to_field_name="name",
        required=False,
        empty_label="a share of the rows, or nothing",
    )
    validation_share = _number(
        "validation_share",
        "Share to validate with",
        "0.1: a tenth of the prompts, always the same ones. They are not trained on.",
    )
    eval_steps = _number("eval_steps", "Steps between validations", "Empty: ten validations.")
    patience = _number(
        "patience",
        "Stop early after",
        "Number of validations without a better loss. The best state is kept.",
    )

    def settings(self) -> list[forms.BoundField]:
        """Return the fields that may stay empty: all but the adapter, its base and the dataset."""
        return [field for field in self if field.name not in ("adapter", "dataset", "base_model")]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("dataset", "validation_dataset"):
            choices(self, name).queryset = Dataset.objects.order_by("name")
        self._only_base: BaseModel | None = None
        base_models = BaseModel.objects.filter(is_serving()).order_by("name")
        if len(base_models) > 1:
            choices(self, "base_model").queryset = base_models
        else:
            # There is no choice.
            del self.fields["base_model"]
            self._only_base = base_models.first()

    def chosen_base(self) -> BaseModel | None:
        """Return the base model of a new adapter; None: it is not chosen. The form is valid."""
        chosen: BaseModel | None = self.cleaned_data.get("base_model")
        return chosen or self._only_base

    def hyperparameters(self) -> dict[str, Any]:
        """Return those that were filled in; the form must be valid."""
        names = (field.name for field in dataclasses.fields(Hyperparameters))
        filled = ((name, self.cleaned_data.get(name)) for name in names)
        found = {name: value for name, value in filled if value not in (None, False, "")}
        if found.get("method") == "supervised":  # the default, which schedules compare
            del found["method"]
        return found


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
        label="Grace period in minutes",
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

    def clean(self) -> dict[str, Any]:
        """Check everything that the service checks, so that all faults are shown at once."""
        data = self.cleaned_data
        zone = data.get("timezone", "UTC")
        try:
            sources.next_slot("", zone)
        except InvalidRequest as error:
            self.add_error("timezone", error.message)
            zone = "UTC"
        for name, check in (("cron", sources.next_slot), ("window", window_of)):
            try:
                check(data.get(name, ""), zone)
            except InvalidRequest as error:
                self.add_error(name, error.message)
        return data

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
        return sorted(timezones())
