"""/v1/models: what the caller may put in `model`."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse

from controlplane.adapters.resolution import ResolvedModel
from controlplane.adapters.services import model_delete
from controlplane.gateway import callers
from controlplane.gateway.row_views import as_caller
from controlplane.gateway.views import gateway_view
from controlplane.inference import access
from controlplane.infra.threads import query_in_thread
from controlplane.tenants.auth import Permission


@gateway_view("GET")
async def model_list(request: HttpRequest) -> HttpResponseBase:
    models = await callers.models(request)
    return JsonResponse({"object": "list", "data": [model_body(model) for model in models]})


@gateway_view("GET", "DELETE")
async def model_detail(request: HttpRequest, name: str) -> HttpResponseBase:
    if request.method == "DELETE":
        principal = await callers.authenticate(request, Permission.ADAPTERS_WRITE)
        access.check_named(principal, name)
        await query_in_thread(as_caller(request, principal, lambda: model_delete(name)))
        return JsonResponse({"id": name, "object": "model", "deleted": True})
    return JsonResponse(model_body(await callers.model(request, name)))


def model_body(model: ResolvedModel) -> dict[str, Any]:
    """A model, as OpenAI writes it."""
    base = model.base_model
    shutdown_date = base.shutdown_date
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "lorikeet" if model.version is None else "tenant",
        "parent": None if model.version is None else base.name,
        # As vLLM has them; `root` is whose tokenizer it is.
        "root": base.name,
        "max_model_len": base.context_length,
        "version": None if model.version is None else model.version.number,
        "shutdown_date": shutdown_date and shutdown_date.isoformat(),
    }
