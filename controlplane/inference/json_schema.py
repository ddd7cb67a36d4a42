"""The schemas of /v1: bounded when the body is read, planned when the job is made."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pydantic_core import PydanticCustomError

from contract.messages.protocol import ErrorCode, GenerateJob
from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import literal, whole_text
from controlplane.errors import InvalidRequest
from controlplane.schemas import BadSchema, Plan, Status, paths, plan
from controlplane.tenancy.scope import tenant_scope

SCHEMA_PARAM = "response_format.json_schema.schema"


def checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raises PydanticCustomError saying what is wrong and where."""
    try:
        plan(schema)
    except BadSchema as error:
        raise PydanticCustomError("invalid_schema", "{problem}", {"problem": str(error)}) from error
    return schema


def planned(
    schema: dict[str, Any],
    *,
    strict: bool,
    param: str = SCHEMA_PARAM,
    code: str = ErrorCode.INVALID_RESPONSE_FORMAT,
) -> Plan:
    """Plan how a schema is enforced. Raises InvalidRequest, naming the keywords, for a strict one
    that cannot be enforced whole."""
    try:
        made = plan(schema)
    except BadSchema as error:
        raise InvalidRequest(f"'{param}' {error}.", param=param, code=code) from error
    if strict and not made.is_enforced:
        faults = made.with_status(Status.CHECKED, Status.UNSUPPORTED)
        first = faults[0]
        raise InvalidRequest(
            f"'{param}' cannot be strict: {first.path} is {first.status}, not enforced while "
            f"decoding ({first.reason}). All such keywords: {paths(faults)}.",
            param=param,
            code=code,
        )
    return made


def schema_headers(job: GenerateJob) -> dict[str, str]:
    """Return headers for schemas that are not enforced whole: the answer's, and the tools', whose
    paths begin with the tool's name."""
    plans = {}
    with tenant_scope(uuid.UUID(job.tenant_id)):
        if job.json_schema is not None and not job.is_strict:
            plans[""] = plan(json.loads(job.json_schema))
        for tool in job.tools:
            if tool["function"]["name"] not in job.strict_tools:
                plans[tool["function"]["name"] + ":"] = plan(tool["function"]["parameters"])
    names = {
        "lorikeet-schema-checked": Status.CHECKED,
        "lorikeet-schema-ignored": Status.UNSUPPORTED,
    }
    headers = {}
    for name, status in names.items():
        told = [paths(made.with_status(status), within=where) for where, made in plans.items()]
        if any(told):
            headers[name] = _header_value(", ".join(filter(None, told)))[:1000]
    return headers


def _header_value(text: str) -> str:
    """Write client's paths as one line of printable characters."""
    return "".join(
        character if " " <= character <= "~" else character.encode("unicode_escape").decode()
        for character in text
    ).strip()


def checked_pattern(pattern: str) -> str:
    """Return the pattern. Raises PydanticCustomError for one that cannot be enforced."""
    try:
        whole_text(pattern)
    except BadPattern as error:
        raise PydanticCustomError("invalid_schema", "{problem}", {"problem": str(error)}) from error
    return pattern


def regex_of_pattern(pattern: str) -> str:
    """Return the regular expression of an answer that matches a checked pattern whole."""
    return whole_text(pattern)


def regex_of_choices(choices: list[str]) -> str:
    """Return the regular expression of an answer that is one of `choices`."""
    return f"(?:{'|'.join(literal(choice) for choice in choices)})"
