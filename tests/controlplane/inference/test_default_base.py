"""What answers LoRAX's clients without an adapter."""

from __future__ import annotations

import datetime as dt

import pytest

from controlplane.adapters.models import BaseModel
from controlplane.errors import NotFound, Unavailable
from controlplane.inference import default_base


@pytest.mark.django_db
def test_a_last_base_that_was_shut_down_is_not_called_busy() -> None:
    """A client would come again and again."""
    assert isinstance(default_base._why_none(), Unavailable)
    BaseModel.objects.create(
        name="last",
        revision="0" * 64,
        config={},
        context_length=64,
        shutdown_date=dt.date(2026, 1, 2),
    )
    error = default_base._why_none()
    assert isinstance(error, NotFound) and "`last` was shut down on 2026-01-02" in error.message
