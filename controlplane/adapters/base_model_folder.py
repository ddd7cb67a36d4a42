"""The base model's folder on this machine, according to the settings."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from contract.base_model import BaseModelFolder, find_base_model


def configured_base_model() -> BaseModelFolder | None:
    """Return LORIKEET_BASE_MODEL's model; None if it is not set. Raises NotABaseModel."""
    if not settings.BASE_MODEL:
        return None
    return find_base_model(
        Path(settings.BASE_MODEL),
        name=settings.BASE_MODEL_NAME,
        revision=settings.BASE_MODEL_REVISION,
        origin=settings.BASE_MODEL_ORIGIN,
    )
