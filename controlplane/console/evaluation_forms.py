"""Forms of suites, evaluations and captured requests."""

from __future__ import annotations

import json
from typing import Any

from django import forms

from controlplane.adapters.models import BaseModel
from controlplane.console.forms import choices
from controlplane.evaluations.models import Suite
from controlplane.evaluations.services import MAX_TOKENS
from controlplane.evaluations.suites import MAX_BYTES, MAX_CASE_BYTES
from controlplane.requestlog import capture
from controlplane.tenants.models import slug_validator
from controlplane.training.models import Dataset

CHECKS = (
    ("exact", "is the expected one"),
    ("similarity", "has its words"),
    ("json_f1", "has its JSON’s fields"),
    ("contains", "contains it"),
)
_NAME = {"autocomplete": "off", "spellcheck": "false"}


class _ChecksForm(forms.Form):
    """The suite's name, and how its answers are checked."""

    name = forms.CharField(
        label="Suite",
        max_length=63,
        validators=[slug_validator],
        help_text="If it exists, it gets a new version.",
        widget=forms.TextInput(attrs={"list": "suites", **_NAME}),
    )
    checks = forms.MultipleChoiceField(
        label="An answer is good if it",
        choices=CHECKS,
        initial=["similarity"],
        widget=forms.CheckboxSelectMultiple,
    )
    slice = forms.CharField(
        label="Slice",
        required=False,
        max_length=63,
        help_text="Part of the suite that is also compared separately.",
        widget=forms.TextInput(attrs=_NAME),
    )

    def wanted_checks(self) -> list[dict[str, Any]]:
        """Return the checks as a case has them; the form must be valid."""
        return [{"type": kind} for kind in self.cleaned_data["checks"]]


class SuiteForm(_ChecksForm):
    """A suite's next version, whole: from rows of a dataset, or from cases."""

    description = forms.CharField(required=False, max_length=500)
    dataset = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(),
        to_field_name="name",
        required=False,
        empty_label="none: from the cases below",
        help_text="The last answer of each row is the expected one. Do not train on these rows.",
    )
    every = forms.IntegerField(
        label="Take every n-th row", required=False, min_value=1, max_value=1000, initial=1
    )
    offset = forms.IntegerField(
        label="Beginning with row", required=False, min_value=0, max_value=999, initial=0
    )
    cases = forms.CharField(
        required=False,
        max_length=MAX_BYTES,
        help_text='One on each line: {"messages": […], "expected": "…"}, with its own "checks" and '
        '"slice" if you like.',
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "false", "class": "mono"}),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choices(self, "dataset").queryset = Dataset.objects.order_by("name")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if bool(data.get("dataset")) == bool(data.get("cases")) and not self.errors:
            self.add_error("cases", "Choose a dataset or write cases, one of the two.")
        return data

    def clean_cases(self) -> list[dict[str, Any]]:
        cases = []
        for number, line in enumerate(self.cleaned_data["cases"].splitlines(), 1):
            if not line.strip():
                continue
            try:
                case = json.loads(line)
            except (ValueError, RecursionError):
                case = None
            if not isinstance(case, dict):
                raise forms.ValidationError(f"Line {number} is no JSON object.")
            cases.append(case)
        return cases

    def whole_cases(self) -> list[dict[str, Any]]:
        """Return the written cases, with the form's checks and slice where they have none."""
        own = {"checks": self.wanted_checks(), "slice": self.cleaned_data["slice"]}
        return [{**own, **case} for case in self.cleaned_data["cases"]]


class CaseForm(_ChecksForm):
    """One more case of a suite."""

    messages = forms.CharField(
        label="Prompt",
        max_length=MAX_CASE_BYTES,
        help_text="The messages, as JSON.",
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "false", "class": "mono"}),
    )
    expected = forms.CharField(
        label="Expected answer",
        max_length=MAX_CASE_BYTES,
        strip=False,
        help_text="What the model should answer; correct it here.",
        widget=forms.Textarea(attrs={"rows": 4}),
    )
    #: True if they are a request's: then reading them needs requests:content.
    is_request = forms.BooleanField(required=False, widget=forms.HiddenInput)
    field_order = ("name", "messages", "expected", "checks", "slice")

    def clean_messages(self) -> Any:
        try:
            return json.loads(self.cleaned_data["messages"])
        except (ValueError, RecursionError):
            raise forms.ValidationError("This is not JSON.") from None

    def case(self) -> dict[str, Any]:
        """Return the case; the form must be valid."""
        data = self.cleaned_data
        return {
            "messages": data["messages"],
            "expected": data["expected"],
            "checks": self.wanted_checks(),
            "slice": data["slice"],
        }


class EvaluationForm(forms.Form):
    """The form that runs a suite on a model."""

    model = forms.CharField(
        max_length=200,
        help_text="A version (invoices@3), an alias, an adapter or a base model.",
        widget=forms.TextInput(attrs=_NAME),
    )
    suite = forms.ModelChoiceField(
        queryset=BaseModel.objects.none(), to_field_name="name", empty_label=None
    )
    max_tokens = forms.IntegerField(
        label="Longest answer", min_value=1, max_value=MAX_TOKENS, initial=256, help_text="Tokens."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choices(self, "suite").queryset = Suite.objects.order_by("name")


class CaptureForm(forms.Form):
    """The shares and limits of captured requests."""

    share = forms.FloatField(
        label="Share of all requests",
        min_value=0,
        max_value=1,
        help_text="0: none; 0.1: a tenth; 1: all, except those with store: false.",
    )
    shares = forms.CharField(
        label="By model",
        required=False,
        max_length=10_000,
        help_text="One on each line: support 1. It stands in place of the share of all.",
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false", "class": "mono"}),
    )
    days = forms.IntegerField(label="Days to keep them", min_value=1, max_value=capture.MAX_DAYS)
    max_rows = forms.IntegerField(
        label="Most requests to keep", min_value=1, max_value=capture.MAX_ROWS
    )
    max_mib = forms.IntegerField(
        label="Most MiB to keep", min_value=1, max_value=capture.MAX_BYTES >> 20
    )

    def clean_shares(self) -> dict[str, float]:
        found = {}
        for line in self.cleaned_data["shares"].splitlines():
            name, _, text = line.strip().rpartition(" ")
            if not line.strip():
                continue
            try:
                found[name.strip()] = float(text)
            except ValueError:
                raise forms.ValidationError(
                    f"“{line.strip()[:80]}” is not a model and a share, such as “support 0.1”."
                ) from None
        return found

    @staticmethod
    def initial_of(policy: Any) -> dict[str, Any]:
        """Return what the form shows of a capture policy."""
        return {
            "share": policy.share,
            "shares": "\n".join(f"{name} {share:g}" for name, share in policy.shares.items()),
            "days": policy.days,
            "max_rows": policy.max_rows,
            "max_mib": policy.max_bytes >> 20,
        }


class FromCapturedForm(forms.Form):
    """A dataset of captured requests, and which of them."""

    ONLY = (
        ("all", "all, but those rated bad and not corrected"),
        ("good", "rated good, or corrected"),
        ("corrected", "corrected"),
        ("pairs", "corrected, as pairs for DPO"),
    )

    name = forms.CharField(
        label="Dataset",
        max_length=63,
        validators=[slug_validator],
        help_text="If the name exists, later runs use the new rows.",
        widget=forms.TextInput(attrs=_NAME),
    )
    only = forms.ChoiceField(label="Which", choices=ONLY)
    model = forms.CharField(
        required=False,
        max_length=capture.MAX_MODEL_CHARS,
        help_text="Empty: of all models.",
        widget=forms.TextInput(attrs=_NAME),
    )
    after = forms.DateField(
        label="From", required=False, widget=forms.DateInput(attrs={"type": "date"})
    )
    append = forms.BooleanField(
        label="Add to the rows that it has",
        required=False,
        help_text="Each request once. Else they are replaced.",
    )
