"""The base model of a request that names none: LoRAX serves one, this platform several."""

from __future__ import annotations

import time
from collections.abc import Sequence

from controlplane.adapters.models import BaseModel, is_serving
from controlplane.errors import ApiError, InvalidRequest, NotFound, Unavailable
from controlplane.inference.while_away import Kept, ask
from controlplane.infra.threads import query_in_thread
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenancy import epochs

CACHE_S = 5.0

_known: Kept[Sequence[BaseModel]] | None = None


async def default_base(field: str = "adapter_id") -> BaseModel:
    """Return the base model that is served, if there is exactly one.

    field  of the body that can name one, for the error
    Raises Unavailable if there is none, NotFound if the last has been shut down,
    InvalidRequest if there are several.
    """
    active = await _active()
    if len(active) > 1:
        served = await (await get_dispatcher()).served_models()
        active = [base for base in active if base.name in served] or active
    if not active:
        raise await query_in_thread(_why_none)
    if len(active) > 1:
        names = ", ".join(base.name for base in active[:20])
        raise InvalidRequest(
            f"There are several base models: name one as the {field} ({names}).", param="model"
        )
    return active[0]


def _why_none() -> ApiError:
    last = BaseModel.objects.filter(is_active=True).order_by("-shutdown_date").first()
    if last is None:
        return Unavailable("There is no base model yet.")
    return NotFound(
        f"The model `{last.name}` was shut down on {last.shutdown_date}.",
        param="model",
        code="model_not_found",
    )


async def _active() -> Sequence[BaseModel]:
    global _known
    if _known is None or _known.stamps[0].at + CACHE_S <= time.monotonic():
        _known = await ask(_active_now, _known and Kept(_known, None, _known.stamps))
    return [base for base in _known.answer if not base.is_shut_down]


def _active_now() -> Kept[Sequence[BaseModel]]:
    asked = epochs.stamp()
    return Kept(list(BaseModel.objects.filter(is_serving())[:100]), None, (asked,))


def eos_token_id(base: BaseModel) -> int:
    """Return the id of the token that ends an answer; 0 if the model's config has none."""
    found = base.config.get("eos_token_id")
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, int) else 0
