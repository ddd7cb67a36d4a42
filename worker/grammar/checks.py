"""Which stretches of a finished answer are held against which schema. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from contract.protocol import CALL_BEGIN, GenerateJob
from contract.tool_calls import BLANKS, read_calls

#: The schema of no value at all, for the arguments of a function that nobody knows.
_NOTHING = "false"


class Check(NamedTuple):
    """A stretch of an answer and its schema, both as JSON text.

    param      the job's field that has the schema
    is_strict  whether the request fails when the stretch does not obey
    place      what it is, for people; "" of the whole answer
    """

    schema: str
    text: str
    param: str
    is_strict: bool
    place: str = ""

    def told(self, problem: str) -> str:
        """A problem of the stretch as one of the answer."""
        return f"{self.place}: {problem}" if self.place else problem


def is_bound(job: GenerateJob, answer: str) -> bool:
    """Whether any of the answer, when it is finished, is to obey a schema."""
    return job.json_schema is not None or _has_calls(job, answer)


def checks_of(job: GenerateJob, answer: str) -> Iterator[Check]:
    """What is to be looked at in a finished answer: its calls, or else the whole of it."""
    if not _has_calls(job, answer):
        if job.json_schema is not None:
            yield Check(job.json_schema, answer, "json_schema", job.is_strict)
        return
    functions = {tool["function"]["name"]: tool["function"] for tool in job.tools}
    schemas: dict[str, str] = {}  # as text, which is made once however many calls there are
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
