"""The forms of aliases."""

from __future__ import annotations

import json
import re
from typing import Any

from django import forms

from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import AliasRevision, Ramp
from controlplane.aliases.verdict import BOUNDS, Guard
from controlplane.console.forms import MAX_INT
from controlplane.tenants.models import slug_validator

_PART = re.compile(
    r"(?:(?P<weight>-?[0-9.]+)\s*\*\s*)?(?P<adapter>[^@*\s]+)(?:@(?P<number>[0-9]{1,9}))?"
)
_TARGET_HELP = "invoices (whichever version is live), invoices@3, or 0.7*invoices@3 + 0.3*letters@1"


class TargetField(forms.CharField):
    """The text of a target; the cleaned value is a tuple of parts."""

    def __init__(self, **options: Any) -> None:
        attrs = {"autocomplete": "off", "spellcheck": "false", "class": "mono"}
        super().__init__(max_length=1000, widget=forms.TextInput(attrs=attrs), **options)

    def clean(self, value: Any) -> tuple[Part, ...]:
        text = str(super().clean(value))
        return tuple(_part(term.strip()) for term in text.split("+")) if text else ()

    def prepare_value(self, value: Any) -> Any:
        return " + ".join(map(str, value)) if isinstance(value, tuple) else value


def _part(text: str) -> Part:
    found = _PART.fullmatch(text)
    try:
        if found is None:
            raise ValueError(text)
        number = found["number"]
        return Part(
            adapter=found["adapter"],
            version=None if number is None else int(number),
            weight=1.0 if found["weight"] is None else float(found["weight"]),
        )
    except ValueError as error:
        raise forms.ValidationError(
            f"“{text[:100]}” is not an adapter, an adapter@version, or weight*adapter@version."
        ) from error


class SchemaField(forms.CharField):
    """JSON text of an object; the cleaned value is the object, or None."""

    def __init__(self, **options: Any) -> None:
        attrs = {"rows": 6, "spellcheck": "false", "class": "mono"}
        super().__init__(
            required=False, max_length=200_000, widget=forms.Textarea(attrs=attrs), **options
        )

    def clean(self, value: Any) -> dict[str, Any] | None:
        text = str(super().clean(value))
        if not text:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise forms.ValidationError(f"This is not JSON: {str(error)[:200]}") from error
        if not isinstance(found, dict):
            raise forms.ValidationError("A schema is a JSON object.")
        return found

    def prepare_value(self, value: Any) -> Any:
        return json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, dict) else value


class AliasForm(forms.Form):
    """The contents of an alias, and the name of a new one."""

    name = forms.CharField(
        label="Name",
        max_length=63,
        validators=[slug_validator],
        help_text="The model name in requests. An adapter’s own name is allowed, too.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    primary = TargetField(label="Primary", help_text=_TARGET_HELP)
    canary = TargetField(
        label="Canary", required=False, help_text="Answers some of the callers, as a trial."
    )
    canary_percent = forms.IntegerField(
        label="Percent of the callers for the canary", min_value=0, max_value=100, initial=0
    )
    json_schema = SchemaField(
        label="JSON schema", help_text="Callers that name no format get answers that obey it."
    )
    system_prompt = forms.CharField(
        label="System prompt",
        required=False,
        max_length=16_000,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 4}),
    )
    warmth = forms.ChoiceField(
        label="While nobody asks", choices=AliasRevision.Warmth.choices, initial="cold"
    )
    reason = forms.CharField(label="Why?", required=False, max_length=500)
    is_forced = forms.BooleanField(
        label="Even if the new schema breaks callers of the current one", required=False
    )
    if_revision = forms.IntegerField(
        required=False, min_value=1, max_value=MAX_INT, widget=forms.HiddenInput
    )

    #: Fields that are also fields of `Contents`.
    CONTENTS = ("primary", "canary", "canary_percent", "json_schema", "system_prompt", "warmth")

    @classmethod
    def of(cls, contents: Contents, revision: int) -> AliasForm:
        """Return the form that shows an alias's current contents."""
        shown = {name: getattr(contents, name) for name in cls.CONTENTS}
        form = cls(initial=shown | {"if_revision": revision})
        del form.fields["name"]
        return form

    def contents(self) -> dict[str, Any]:
        """Return the fields of `Contents`; the form must be valid."""
        return {name: self.cleaned_data[name] for name in self.CONTENTS}


class ShareForm(forms.Form):
    percent = forms.IntegerField(label="Percent for the canary", min_value=0, max_value=100)
    reason = forms.CharField(label="Why?", required=False, max_length=500)


class RampForm(forms.Form):
    """A ramp, with the same minutes and sample for each step."""

    percents = forms.CharField(
        label="Steps in percent",
        max_length=100,
        initial="1, 10, 50, 100",
        widget=forms.TextInput(attrs={"autocomplete": "off", "inputmode": "numeric"}),
    )
    minutes = forms.IntegerField(
        label="Minutes between steps", min_value=0, max_value=20_160, initial=30
    )
    min_requests = forms.IntegerField(
        label="Least requests of the canary in each",
        min_value=0,
        max_value=1_000_000,
        initial=50,
    )
    at_end = forms.ChoiceField(
        label="After the last step", choices=Ramp.AtEnd.choices, initial=Ramp.AtEnd.PROMOTE
    )

    def clean_percents(self) -> list[int]:
        text = self.cleaned_data["percents"].replace(",", " ").split()
        if not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in text):
            raise forms.ValidationError("Write numbers from 1 to 100, separated by commas.")
        return [int(part) for part in text]

    def steps(self) -> list[dict[str, int]]:
        """Return the steps; the form must be valid."""
        rest = {name: self.cleaned_data[name] for name in ("minutes", "min_requests")}
        return [{"percent": percent, **rest} for percent in self.cleaned_data["percents"]]


class GuardForm(forms.Form):
    """The limits at which the canary is rolled back by itself; an empty measure is not watched."""

    is_on = forms.BooleanField(label="Roll back a bad canary automatically", required=False)
    min_requests = forms.IntegerField(label="Least requests of the canary")
    errors_points = forms.FloatField(label="Errors: points worse", required=False)
    schema_points = forms.FloatField(label="Schema failures: points worse", required=False)
    truncations_points = forms.FloatField(label="Truncations: points worse", required=False)
    first_token_factor = forms.FloatField(label="First token: times slower", required=False)
    token_factor = forms.FloatField(label="Each token: times slower", required=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, (least, most) in BOUNDS.items():
            if name in self.fields:
                self.fields[name].widget.attrs |= {"min": least, "max": most, "step": "any"}

    @classmethod
    def of(cls, guard: Guard) -> GuardForm:
        """Return the form that shows a guard."""
        return cls(initial={name: getattr(guard, name) for name in cls.base_fields})
