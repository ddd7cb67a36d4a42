"""Finds the parts of a finished answer to check, and their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from contract.messages.protocol import CALL_BEGIN, GenerateJob
from contract.messages.tool_calls import BLANKS, read_calls

#: A schema that no value obeys, for the arguments of an unknown function.
_NOTHING = "false"


class Check(NamedTuple):
    """A part of an answer and its schema, both JSON text.

    param      the job's field that has the schema
    is_strict  whether the request fails if the part violates the schema
    place      the part's name in messages; "" for the whole answer
    """

    schema: str
    text: str
    param: str
    is_strict: bool
    place: str = ""

    def told(self, problem: str) -> str:
        """Return the message for the whole answer about a problem of this part."""
        return f"{self.place}: {problem}" if self.place else problem


def is_bound(job: GenerateJob, answer: str) -> bool:
    """Return whether any part of the finished answer must obey a schema."""
    return job.json_schema is not None or _has_calls(job, answer)


def checks_of(job: GenerateJob, answer: str) -> Iterator[Check]:
    """Yield the parts of a finished answer to check: its calls, or else the whole answer."""
    if not _has_calls(job, answer):
        if job.json_schema is not None:
            yield Check(job.json_schema, answer, "json_schema", job.is_strict)
        return
    functions = {tool["function"]["name"]: tool["function"] for tool in job.tools}
    schemas: dict[str, str] = {}  # as text, made once for all calls of a function
    for number, (name, arguments) in enumerate(read_calls(answer)):
        if name in functions and name not in schemas:
            schemas[name] = json.dumps(functions[name]["parameters"], ensure_ascii=False)
        yield Check(
            schemas.get(name, _NOTHING),
            arguments,
            "tools",
            name in job.strict_tools,
            f"call {number} of {name}",
        )


def _has_calls(job: GenerateJob, answer: str) -> bool:
    return bool(job.tools) and answer.lstrip(BLANKS).startswith(CALL_BEGIN.strip())
