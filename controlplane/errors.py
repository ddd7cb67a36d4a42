"""Errors as the caller sees them: one tree for the gateway, the API and the workers.

    ApiError
    ├── InvalidRequest          400  invalid_request_error
    │   └── (any code)               context_length_exceeded, invalid_response_format, …
    ├── AuthenticationFailed    401  authentication_error    invalid_api_key
    ├── PermissionDenied        403  permission_error
    ├── NotFound                404  invalid_request_error   not_found, model_not_found
    ├── MethodNotAllowed        405  invalid_request_error   Allow
    ├── RequestTimeout          408  invalid_request_error
    ├── Conflict                409  invalid_request_error   never retried by clients
    ├── PayloadTooLarge         413  invalid_request_error
    ├── UnsupportedMediaType    415  invalid_request_error
    ├── RateLimited             429  rate_limit_error        Retry-After
    │   └── limits.admission             requests, tokens, insufficient_quota
    ├── Unavailable             503  server_error            Retry-After
    └── InternalError           500  server_error

The body is always OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.http import Http404, JsonResponse
from rest_framework import exceptions as drf
from rest_framework.response import Response

from contract.messages.protocol import ErrorCode

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ApiError(Exception):
    """An error with a status and a body of its own."""

    status = 500
    type = "server_error"
    code: str | None = None
    #: Sent as x-should-retry, which OpenAI's clients obey; None: the client decides.
    should_retry: bool | None = None
    retry_after_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        if code is not None:
            self.code = code
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        return headers

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), status=self.status, headers=self.headers())


class InvalidRequest(ApiError):
    """The request cannot be understood or cannot be served as it is."""

    status, type, should_retry = 400, "invalid_request_error", False


class AuthenticationFailed(ApiError):
    """The key is missing, malformed, unknown, expired or revoked."""

    status, type, code = 401, "authentication_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "WWW-Authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """The caller is known but may not do this."""

    status, type, code = 403, "permission_error", "permission_denied"


class NotFound(ApiError):
    """It does not exist or belongs to another tenant: both get the same answer."""

    status, type, code = 404, "invalid_request_error", "not_found"


def require(row: _T | None, otherwise: str, *, param: str | None = None) -> _T:
    """Return a row that was looked up. Raises NotFound with the message `otherwise` for None."""
    if row is None:
        raise NotFound(otherwise, param=param)
    return row


class MethodNotAllowed(ApiError):
    """The address exists and takes other methods."""

    status, type, code, should_retry = 405, "invalid_request_error", "method_not_allowed", False

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Allow": ", ".join(self.allowed)}


class RequestTimeout(ApiError):
    """The request did not arrive in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class Conflict(ApiError):
    """The state of the resource does not allow this."""

    status, type, code, should_retry = 409, "invalid_request_error", "conflict", False


class PayloadTooLarge(ApiError):
    """The body is longer than the endpoint allows."""

    status, type, code, should_retry = 413, "invalid_request_error", "payload_too_large", False


class UnsupportedMediaType(ApiError):
    """The endpoint does not read bodies of this type."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"
    should_retry = False


class RateLimited(ApiError):
    """The tenant's own limit is reached."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry_after_s: float | None = 1.0


class Unavailable(ApiError):
    """The platform cannot serve this now, but later."""

    status, type, code, retry_after_s = 503, "server_error", "overloaded", 1.0


class InternalError(ApiError):
    """An error in the platform."""

    status, code = 500, "internal"


class GivenUp(InternalError):
    """A request that crashed several workers."""

    should_retry = False


#: The error for each code of a worker. A test checks that none is missing.
WORKER_ERRORS: dict[ErrorCode, type[ApiError]] = {
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: InvalidRequest,
    ErrorCode.INVALID_PROMPT: InvalidRequest,
    ErrorCode.INVALID_RESPONSE_FORMAT: InvalidRequest,
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.ADAPTER_INCOMPATIBLE: Conflict,
    ErrorCode.ADAPTER_UNAVAILABLE: Unavailable,
    ErrorCode.OVERLOADED: Unavailable,
    ErrorCode.DEADLINE_EXCEEDED: Unavailable,
    ErrorCode.WORKER_LOST: Unavailable,
    ErrorCode.GIVEN_UP: GivenUp,
    ErrorCode.ADAPTER_QUARANTINED: Conflict,
    ErrorCode.GRAMMAR_QUOTA: RateLimited,
    ErrorCode.GRAMMAR_FAILED: InternalError,
    ErrorCode.ANSWER_INVALID: InternalError,
    ErrorCode.INTERNAL: InternalError,
}


def from_worker(code: str, message: str, param: str | None = None) -> ApiError:
    """Return the error for one that a worker reported."""
    try:
        error_class = WORKER_ERRORS[ErrorCode(code)]
    except ValueError:  # a newer worker
        error_class = InternalError
    return error_class(message, param=param, code=code)


def from_validation(error: ValidationError) -> InvalidRequest:
    """Return a model's validation error as ours, with the first field as `param`."""
    if hasattr(error, "error_dict"):
        field, messages = next(iter(error.message_dict.items()))
        return InvalidRequest(" ".join(messages), param=None if field == "__all__" else field)
    return InvalidRequest(" ".join(error.messages))


def drf_exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Answer all errors of /api with OpenAI's body; Django REST framework's EXCEPTION_HANDLER."""
    if not isinstance(error, ApiError):
        converted = _from_drf(error)
        if converted is None:
            return None  # Django turns it into a 500 and logs the traceback
        error = converted
    return Response(error.body(), status=error.status, headers=error.headers())


def _sendable(text: str) -> str:
    """Replace lone surrogates, which a message may quote from a request and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def from_fields(error: drf.ValidationError) -> InvalidRequest:
    """Return the error of a body with lists in it: its `param` is as `adapters[3].base_model`."""
    param, message = _first_detail(error.detail)
    return InvalidRequest(message, param=param and _INDEX.sub(r"[\1]", param))


_EXPECTED = re.compile(r"(Invalid data\. )?Expected a (list|dictionary)\b.* but got ")
_INDEX = re.compile(r"\.([0-9]+)(?=\.|\Z)")
NOTHING_HERE = "There is no such resource."


def _from_drf(error: Exception) -> ApiError | None:
    if isinstance(error, drf.ValidationError):
        param, message = _first_detail(error.detail)
        return InvalidRequest(message, param=param)
    if isinstance(error, drf.NotAuthenticated):
        return AuthenticationFailed(
            "No API key was provided. Send it in the header Authorization: Bearer <key>."
        )
    if isinstance(error, drf.AuthenticationFailed):
        return AuthenticationFailed(str(error.detail))
    if isinstance(error, drf.PermissionDenied):
        return PermissionDenied(str(error.detail))
    if isinstance(error, drf.NotFound):
        return NotFound(NOTHING_HERE)
    if isinstance(error, drf.APIException):
        converted = InvalidRequest(str(error.detail))
        converted.status = error.status_code
        return converted
    if isinstance(error, Http404 | ObjectDoesNotExist):
        return NotFound(NOTHING_HERE)
    return None


def _first_detail(detail: Any, path: str = "") -> tuple[str | None, str]:
    """Return the dotted path to the first field with an error, and its message."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            step = "" if name == "non_field_errors" else str(name)
            return _first_detail(inner, ".".join(part for part in (path, step) if part))
    if isinstance(detail, list) and detail:
        index = next((i for i, inner in enumerate(detail) if inner), 0)
        inner = detail[index]
        if isinstance(inner, dict | list):
            return _first_detail(inner, f"{path}.{index}" if path else str(index))
        return path or None, _in_json_words(str(inner))
    return path or None, _in_json_words(str(detail))


def _in_json_words(message: str) -> str:
    """Return a message of Django REST framework without the names of Python's types."""
    if _EXPECTED.match(message) is None:
        return message
    return "This must be a list." if "a list" in message else "This must be an object."
