"""Every change to base models, adapters and their versions."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError

from controlplane.adapters.models import BaseModel
from controlplane.errors import from_validation


def base_model_add(*, name: str, revision: str, config: dict[str, Any]) -> BaseModel:
    """Make a base model known, or bring a known one up to date.

    config   its Hugging Face config.json
    Raises InvalidRequest when a name or a dimension is missing or wrong.
    """
    base_model = BaseModel.objects.filter(name=name).first() or BaseModel(name=name)
    base_model.revision = revision
    base_model.config = config
    base_model.context_length = config.get("max_position_embeddings", 0)
    try:
        base_model.full_clean(validate_unique=False)
    except ValidationError as error:
        raise from_validation(error) from error
    base_model.save()
    return base_model
