"""Read settings from an environment; errors name the wrong variable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from django.core.exceptions import ImproperlyConfigured

_Number = TypeVar("_Number", int, float)


class Variables:
    """The variables of an environment. All methods raise ImproperlyConfigured."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        """Return the variable `name`, or the content of the file that `name`_FILE points to.

        An empty value counts as not set.
        """
        file = self._environment.get(f"{name}_FILE")
        try:
            value = Path(file).read_text().strip() if file else self._environment.get(name)
        except (OSError, ValueError) as error:
            raise ImproperlyConfigured(f"{name}_FILE: {error}") from error
        value = value or default
        if value is None:
            raise ImproperlyConfigured(f"the environment variable {name} is not set")
        if "change-me" in value:
            raise ImproperlyConfigured(f"{name} is still change-me: set a value of your own")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self.text(name, "1" if default else "0").lower() in {"1", "true", "yes", "on"}

    def number(
        self, name: str, default: _Number, least: float = 0, most: float = math.inf
    ) -> _Number:
        """Return a number of the default's kind, within the bounds; never NaN or infinity."""
        text, kind = self.text(name, str(default)), type(default)
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and value != math.inf:
                return value
        wanted = "a whole number" if kind is int else "a number"
        bounds = f"from {least:.15g} " + ("on" if most == math.inf else f"to {most:.15g}")
        raise ImproperlyConfigured(f"{name} is {text!r}, not {wanted} {bounds}")
