"""The models that the current caller may name: all, or those in the `allowed_models` of its key.

It is set beside the tenant scope, and read where a row is looked up: `check_named` before a name is
looked up, `TenantManager.allowed` for rows. Code outside any request may name all models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import uuid
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from controlplane.errors import PermissionDenied

_CODE = "model_not_allowed"


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The list of a bound key, which is not empty, and the key's id."""

    allowed: tuple[str, ...]
    key_id: uuid.UUID


_current: ContextVar[Bounds | None] = ContextVar("model_scope", default=None)


@contextlib.contextmanager
def model_scope(bounds: Bounds | None) -> Iterator[None]:
    """Let the code inside name only these models; None: all."""
    token = _current.set(bounds)
    try:
        yield
    finally:
        _current.reset(token)


def current_bounds() -> Bounds | None:
    """Return the bounds of the caller's key; None if it may name all models."""
    return _current.get()


def allows_model(allowed: Iterable[str], name: str) -> bool:
    """Return whether a list of models allows `name`: `invoices` allows `invoices@3`, too."""
    allowed = tuple(allowed)
    return not allowed or name in allowed or name.partition("@")[0] in allowed


def may_name(name: str) -> bool:
    """Return whether the caller may name a model."""
    bounds = _current.get()
    return bounds is None or allows_model(bounds.allowed, name)


def check_named(name: str, param: str | None = None) -> None:
    """Raise PermissionDenied for a model that the caller may not name.

    Call it before the model is looked up, so that the answer does not tell whether it exists.
    """
    if not may_name(name):
        raise refusal(name, param)


def check_unbound(why: str, param: str | None = None) -> None:
    """Raise PermissionDenied if the caller's key is bound to models; `why` is a sentence."""
    if _current.get() is not None:
        raise PermissionDenied(
            f"{why} An API key with allowed_models may not do that.", param=param, code=_CODE
        )


def refusal(name: str, param: str | None) -> PermissionDenied:
    return PermissionDenied(
        f"This API key may not use the model `{name[:200]}`.", param=param, code=_CODE
    )


def allowed_pattern() -> str | None:
    """Return the regular expression of the names that the caller may use; None: all names.

    It allows what `allows_model` does, in each form that `adapters.resolution` reads.
    """
    bounds = _current.get()
    return None if bounds is None else _pattern(bounds.allowed)


@functools.lru_cache(maxsize=256)
def _pattern(allowed: tuple[str, ...]) -> str:
    forms = []
    for entry in allowed:
        name, at, number = entry.partition("@")
        version = number if at else "[1-9][0-9]*"
        one = rf"{re.escape(name)}@{version}|ft:[^:]+:[^:]+:{re.escape(name)}:{version}"
        forms.append(one if at else rf"{re.escape(name)}|{one}")
    return rf"^(?:{'|'.join(forms)})$"
