"""The forms of an adapter's next version: its upload and its import."""

from __future__ import annotations

from typing import Any

from django import forms

from controlplane.adapters.import_sources import MAX_URL_CHARS
from controlplane.adapters.models import BaseModel, is_serving
from controlplane.console.forms import choices
from controlplane.tenants.models import slug_validator

_PLAIN = {"autocomplete": "off", "spellcheck": "false"}


class AdapterForm(forms.Form):
    """The adapter that gets a version, and its base model."""

    name = forms.CharField(
        label="Adapter name",
        max_length=63,
        validators=[slug_validator],
        help_text="The model name in requests. An existing name gets a new version.",
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choices(self, "base_model").queryset = BaseModel.objects.filter(is_serving()).order_by(
            "name"
        )


class UploadForm(AdapterForm):
    """An adapter's upload; `config` and `tensors` are the lengths of its two files in bytes."""

    accept_base_mismatch = forms.BooleanField(
        label="Accept another name of the base model",
        required=False,
        help_text="adapter_config.json may then name another model, which must be the same one.",
    )
    config = forms.IntegerField(min_value=1)
    tensors = forms.IntegerField(min_value=1)


class ImportForm(AdapterForm):
    """A repository of the Hub, or two addresses; the service checks that exactly one is given."""

    repository = forms.CharField(
        label="Repository",
        required=False,
        max_length=200,
        help_text="Its owner and name.",
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "acme/invoices-lora"}),
    )
    revision = forms.CharField(
        label="Revision",
        required=False,
        max_length=200,
        help_text="A branch, a tag or a commit. Its present commit is stored.",
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "main"}),
    )
    token = forms.CharField(
        label="Token",
        required=False,
        max_length=500,
        help_text="For a private or gated repository. It is forgotten when the files are fetched.",
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
    )
    config_url = forms.CharField(
        label="Address of adapter_config.json",
        required=False,
        max_length=MAX_URL_CHARS,
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "https://…"}),
    )
    tensors_url = forms.CharField(
        label="Address of adapter_model.safetensors",
        required=False,
        max_length=MAX_URL_CHARS,
        widget=forms.TextInput(attrs={**_PLAIN, "placeholder": "https://…"}),
    )
