"""The base model of a request that names none: LoRAX serves one, this platform several."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.adapters.models import BaseModel, is_serving
from controlplane.errors import ApiError, InvalidRequest, NotFound, Unavailable
from controlplane.infra.web.threads import query_in_thread
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenancy import epochs
from controlplane.tenancy.lookup import Lookup

_SERVING = "serving"
_known: Lookup[str, Sequence[BaseModel]] = Lookup(fresh_s=5.0, max_entries=1)


async def default_base(field: str = "adapter_id") -> BaseModel:
    """Return the base model that is served, if there is exactly one.

    field  of the body that can name one, for the error
    Raises Unavailable if there is none, NotFound if the last has been shut down,
    InvalidRequest if there are several.
    """
    active = await _active()
    if len(active) > 1:
        served = await (await get_dispatcher()).workers.served_models()
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
    found = await _known.find([_SERVING], lambda found: found[0], _active_now)
    return [base for base in found if not base.is_shut_down]


def _active_now() -> Sequence[BaseModel]:
    asked = epochs.stamp()
    found = list(BaseModel.objects.filter(is_serving())[:100])
    _known.put(_SERVING, found, asked)
    return found


def eos_token_id(base: BaseModel) -> int:
    """Return the id of the token that ends an answer; 0 if the model's config has none."""
    found = base.config.get("eos_token_id")
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, int) else 0
