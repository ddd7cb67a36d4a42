"""What all bodies of the gateway have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
