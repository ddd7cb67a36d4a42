"""The upload form, and the calls of its script: begin, sign parts, show the state, complete.

The browser sends the files directly to the object store, part by part, by presigned URLs; this
process never gets them.
"""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from contract.adapters import peft_config, safetensors_header
from controlplane.adapters import services, uploads
from controlplane.adapters.models import Adapter
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.adapter_forms import UploadForm
from controlplane.console.forms import add_service_error
from controlplane.deletion import services as deletion
from controlplane.errors import ApiError, InvalidRequest, PayloadTooLarge
from controlplane.tenants.auth import Permission

MAX_BODY_BYTES = 10_000
#: The file that each field of the form means.
FIELDS = {"config": peft_config.FILE, "tensors": safetensors_header.FILE}


@require_safe
@member_page(permission=Permission.ADAPTERS_WRITE)
def upload(request: ConsoleRequest) -> HttpResponse:
    name = request.GET.get("adapter", "")
    adapter = Adapter.objects.filter(name=name).select_related("base_model").first()
    initial = {"name": adapter.name, "base_model": adapter.base_model.name} if adapter else {}
    form = UploadForm(initial=initial)
    base_models = form.fields["base_model"].queryset.exists()  # type: ignore[attr-defined]
    return render(request, "console/upload.html", {"form": form, "base_models": base_models})


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def start_upload(request: ConsoleRequest) -> HttpResponse:
    """Make the version; return the URLs that sign, list and complete its parts.

    Body: {"name", "base_model", "accept_base_mismatch", "config", "tensors"}, the last two being
    lengths in bytes.
    422 with {"errors": {field: [message]}} when a field is wrong.
    """
    form = UploadForm(_read_json(request))
    if not form.is_valid():
        return _errors(form)
    data = form.cleaned_data
    try:
        version = services.adapter_version_create(
            name=data["name"],
            base_model_name=data["base_model"].name,
            files={file: data[field] for field, file in FIELDS.items()},
            created_by=request.user,
            is_multipart=True,
            accepts_base_mismatch=data["accept_base_mismatch"],
        )
    except ApiError as error:
        fields = {f"files.{file}": field for field, file in FIELDS.items()}
        add_service_error(form, error.message, fields.get(error.param or "", error.param))
        return _errors(form)
    place = (version.adapter.name, version.number)
    return JsonResponse(
        {
            "parts_url": reverse("console:sign_parts", args=place),
            "state_url": reverse("console:upload_state", args=place),
            "abort_url": reverse("console:abort_upload", args=place),
            "complete_url": reverse("console:complete_upload", args=place),
            "version_url": reverse("console:version", args=place),
        }
    )


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def sign_parts(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Return a URL for a part. Body: {"file": field, "number", "sha256"}."""
    version = services.adapter_version_get(name=name, number=number)
    body = _read_json(request)
    file = FIELDS.get(str(body.get("file")), "")
    digests = {str(body.get("number")): str(body.get("sha256"))}
    [signed] = uploads.parts_sign(version=version, file=file, digests=digests)
    return JsonResponse(signed)


@require_safe
@member_page(permission=Permission.ADAPTERS_WRITE)
def upload_state(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Return the stated and the arrived parts, by field of the form."""
    state = uploads.upload_state(services.adapter_version_get(name=name, number=number))
    found = state["files"]
    files = {field: found[file] for field, file in FIELDS.items() if file in found}
    return JsonResponse({"status": state["status"], "files": files})


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def abort_upload(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Abort an upload: its version is deleted."""
    version = services.adapter_version_get(name=name, number=number)
    uploads.check_open(version)
    deletion.version_delete(version=version)
    return JsonResponse({})


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def complete_upload(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Queue the check of both uploaded files."""
    services.adapter_version_complete(
        version=services.adapter_version_get(name=name, number=number)
    )
    return JsonResponse({})


def _read_json(request: ConsoleRequest) -> dict[str, Any]:
    if int(request.META.get("CONTENT_LENGTH") or 0) > MAX_BODY_BYTES:
        raise PayloadTooLarge("The body is too long.")
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The body is not JSON.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return body


def _errors(form: UploadForm) -> JsonResponse:
    return JsonResponse({"errors": form.errors}, status=422)
