"""Parse and check a body; of its faults, one error names the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from controlplane.errors import InvalidRequest
from controlplane.inference.bodies import Body
from controlplane.inference.faults import is_other, said, words_of
from controlplane.infra import finite_json

_B = TypeVar("_B", bound=Body)

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "invalid_schema": "invalid_response_format",
}


def parse_body(kind: type[_B], body: bytes) -> _B:
    """Parse a body as `kind`. Raises InvalidRequest naming the field at fault."""
    finite_json.check_body(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):  # jiter and json differ on odd input
            given = {}
        raise _to_invalid_request(error, given) from None


def make_body(kind: type[_B], **fields: Any) -> _B:
    """Return a body with these fields, checked. Raises InvalidRequest as `parse_body` does."""
    try:
        return kind(**fields)
    except ValidationError as error:
        raise _to_invalid_request(error, fields) from None


def _to_invalid_request(error: ValidationError, given: Any) -> InvalidRequest:
    details = error.errors(include_url=False)
    first = details[0]
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:
            return InvalidRequest("The body is nested too deeply.")
        return InvalidRequest(f"The body is not valid JSON: {first['msg'][:300]}.")
    # The member of a union that got furthest before it failed says most.
    paths = [_path(detail, given) for detail in details]
    best = max(
        range(len(details)), key=lambda index: (len(paths[index]), not is_other(details[index]))
    )
    others = [details[i] for i in range(len(details)) if i != best and paths[i] == paths[best]]
    return _describe(details[best], paths[best], others)


def _path(detail: ErrorDetails, given: Any) -> list[str]:
    """Return the fault's place in the client's body, without pydantic's steps into unions."""
    path, here = [], given
    for step in detail["loc"]:
        if isinstance(here, dict) and step in here:
            here = here[step]
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            here = here[step]
        elif detail["type"] != "missing" or step != detail["loc"][-1]:
            continue
        path.append(str(step))
    return path


def _describe(detail: ErrorDetails, path: list[str], others: list[ErrorDetails]) -> InvalidRequest:
    kind, message = detail["type"], words_of(detail)
    if kind in ("value_error", "missing") and ": " in message:
        # A message about a whole object: "field: what is wrong".
        field, problem = message.split(": ", 1)
        if " " not in field:  # else it is a sentence with a colon
            path, message = [*path, field], problem
    param = ".".join(path)[:200] or None
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "invalid_schema" and path[:1] == ["tools"]:
        code = "invalid_function_parameters"
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
    elif kind == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}."
    elif kind in ("unsupported", "invalid_schema"):
        message = f"'{param}' {message}."
    elif kind in ("value_error", "assertion_error"):
        message = f"Invalid value for '{param or 'the body'}': {message[:500]}."
    else:
        shown = f"'{param}'" if param else "the body"
        message = f"Invalid value for {shown}: it {said(detail, others)[:500]}."
    return InvalidRequest(message, param=param, code=code)
