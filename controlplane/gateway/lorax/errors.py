"""Failures as LoRAX writes them: {"error", "error_type"} under its statuses.

lorax-client raises an exception for each, by `error_type` if it knows it, else by the status.

    error_type              status   lorax-client raises
    validation              422      ValidationError
    generation              424      GenerationError
    overloaded              429 503  OverloadedError
    incomplete_generation   500      IncompleteGenerationError
    rate_limit              429      RateLimitExceededError
    not_found               404      NotFoundError
    authentication          401      UnknownError
    permission              403      ShardNotReadyError, by the status
"""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse, JsonResponse

from contract.messages.protocol import ErrorCode
from controlplane.errors import (
    ApiError,
    AuthenticationFailed,
    Conflict,
    GivenUp,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    PermissionDenied,
    RateLimited,
    Unavailable,
)

#: The first that fits decides -> status, error_type
_ANSWERS: tuple[tuple[type[ApiError], tuple[int, str]], ...] = (
    (InvalidRequest, (422, "validation")),
    (PayloadTooLarge, (413, "validation")),
    (MethodNotAllowed, (405, "validation")),
    (AuthenticationFailed, (401, "authentication")),
    (PermissionDenied, (403, "permission")),
    (NotFound, (404, "not_found")),
    (Conflict, (424, "generation")),
    (RateLimited, (429, "rate_limit")),
    (Unavailable, (503, "overloaded")),
    (GivenUp, (424, "generation")),
    (InternalError, (500, "incomplete_generation")),
)
#: What LoRAX calls overloaded: a retry soon may succeed.
_OVERLOADED = {"slow_down", "server_is_overloaded", ErrorCode.OVERLOADED}
_INCOMPLETE = {ErrorCode.WORKER_LOST}

#: The fields of the bodies that this one becomes, by LoRAX's names.
_PARAMS = {
    "model": "parameters.adapter_id",
    "prompt": "inputs",
    "input": "inputs",
    "messages": "inputs",
    "messages.0.content": "inputs",
    "top_logprobs": "parameters.return_k_alternatives",
    "response_format.json_schema.schema": "parameters.response_format.schema",
    "deadline": None,
}


def status_and_type(error: ApiError) -> tuple[int, str]:
    if isinstance(error, RateLimited | Unavailable) and error.code in _OVERLOADED:
        return 429, "overloaded"
    if error.code in _INCOMPLETE:
        return 500, "incomplete_generation"
    for kind, answer in _ANSWERS:
        if isinstance(error, kind):
            return answer
    return 500, "incomplete_generation"


def error_body(error: ApiError) -> dict[str, Any]:
    _, error_type = status_and_type(error)
    message = error.message
    param = client_param(error.param)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return {"error": message, "error_type": error_type}


def client_param(param: str | None) -> str | None:
    """Return LoRAX's name of the field at fault."""
    if param is None or param in _PARAMS:
        return _PARAMS.get(param or "")
    if param.startswith("adapters."):
        return f"parameters.merged_adapters.ids.{param.split('.')[1]}"
    return param


def error_response(error: ApiError) -> HttpResponse:
    status, _ = status_and_type(error)
    return JsonResponse(error_body(error), status=status, headers=error.headers())
