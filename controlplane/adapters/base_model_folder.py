"""The base model's folder on this machine, according to the settings."""

from __future__ import annotations

import contextlib
from pathlib import Path

from django.conf import settings

from contract.adapters.base_model import BaseModelFolder, NotABaseModel, find_base_model


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


def local_base_model(name: str) -> BaseModelFolder | None:
    """Return this machine's base model of that name; None if it has none."""
    with contextlib.suppress(NotABaseModel):
        found = configured_base_model()
        if found is not None and found.name == name:
            return found
    with contextlib.suppress(NotABaseModel):
        return find_base_model(settings.BASE_MODEL_DIR / name, name=name)
    return None
