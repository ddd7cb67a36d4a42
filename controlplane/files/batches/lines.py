"""The lines of batch files: requests and results."""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

from controlplane.errors import ApiError, InvalidRequest
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.answers import answer_of
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body, in_our_words
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.inference.service import Generation, SubmittedBody
from controlplane.inference.vectors import EmbeddingsBody
from controlplane.tenancy.public_ids import public_id
from controlplane.tenancy.scoping import new_id, tenant_scope

MAX_LINES = 50_000
#: Largest number of lines, including empty ones.
MAX_RAW_LINES = 4 * MAX_LINES
#: The live API's limit of a body, and some bytes for the fields around it.
MAX_LINE_BYTES = 8 * 1024**2 + 4096
MAX_CUSTOM_ID = 512
#: The address that the lines are for -> how its bodies are read.
ENDPOINTS: dict[str, type[ChatBody | CompletionBody | EmbeddingsBody | ResponsesBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
}


class LineFault(Exception):
    """A fault of a line, with OpenAI's code, which fails its batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def told(self, line: int | None) -> dict[str, Any]:
        """Return the fault as one of the batch's `errors`."""
        # PostgreSQL keeps neither NUL nor half a surrogate pair; the client's words may have them.
        message = self.message.replace("\0", "?").encode(errors="replace").decode()
        return {"code": self.code, "message": message, "param": self.param, "line": line}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A request of a batch. `number` counts from 1; `body` is JSON, not yet checked."""

    number: int
    custom_id: str
    body: bytes
    model: str


def parse_line(number: int, raw: bytes, endpoint: str) -> Line:
    """Read a line's request. Raises LineFault if it is not valid for this endpoint."""
    if len(raw) > MAX_LINE_BYTES:
        raise LineFault("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    try:
        fields = json.loads(raw)
    except RecursionError:
        raise LineFault("invalid_json_line", "The line is nested too deeply.") from None
    except ValueError:
        raise LineFault("invalid_json_line", "The line is not valid JSON in UTF-8.") from None
    if not isinstance(fields, dict):
        raise LineFault("invalid_json_line", "The line must be a JSON object.")
    custom_id = _text(fields, "custom_id")
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineFault(
            "invalid_custom_id",
            f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.",
            "custom_id",
        )
    if (method := _text(fields, "method")) != "POST":
        raise LineFault("invalid_method", f"method must be POST, not {method[:20]!r}.", "method")
    if (url := _text(fields, "url")) != endpoint:
        raise LineFault(
            "invalid_url", f"url must be {endpoint}, the batch's, not {url[:100]!r}.", "url"
        )
    body = fields.get("body")
    if not isinstance(body, dict):
        raise LineFault("invalid_body", "body must be a JSON object.", "body")
    return Line(
        number=number,
        custom_id=custom_id,
        body=json.dumps(body, separators=(",", ":")).encode(),
        # A blend may leave it out.
        model="" if body.get("adapters") else _text(body, "model", "body."),
    )


def _text(fields: dict[str, Any], name: str, path: str = "") -> str:
    value = fields.get(name)
    if value is None:
        raise LineFault(
            "missing_required_parameter",
            f"Missing required parameter: '{path}{name}'.",
            f"{path}{name}",
        )
    if not isinstance(value, str):
        raise LineFault("invalid_type", f"{path}{name} must be a string.", f"{path}{name}")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The checked body of a line.

    body      the body to submit
    response  the body of a response, which `body` expresses as a chat
    """

    body: SubmittedBody
    response: ResponsesBody | None = None

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """Return the finished answer as the endpoint writes it. Raises ApiError."""
        if self.response is None:
            return await generation.whole()
        answer = answer_of(self.response, generation)
        return answer.whole([event async for event in generation.events()])


def parse_request(line: Line, endpoint: str, tenant_id: uuid.UUID) -> Request:
    """Check the body of a tenant's line as the live API does. Raises InvalidRequest."""
    with tenant_scope(tenant_id):
        return _parsed(line, endpoint)


def _parsed(line: Line, endpoint: str) -> Request:
    body = parse_body(ENDPOINTS[endpoint], line.body)
    if body.stream:
        raise InvalidRequest(
            "A batch's line cannot be streamed: leave `stream` out.", param="stream"
        )
    if isinstance(body, ResponsesBody):
        return Request(body=chat_body(body), response=body)
    return Request(body=body)


def answer_line(custom_id: str, request_id: str, status_code: int, body: dict[str, Any]) -> str:
    """Write a line of the output file, or of the error file if the status is an error."""
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def error_line(custom_id: str, request_id: str, error: ApiError, endpoint: str) -> str:
    if endpoint == ResponsesBody.endpoint:
        error = in_our_words(error)
    return answer_line(custom_id, request_id, error.status, error.body())


def unfinished_line(custom_id: str, code: str, message: str) -> str:
    """Write a line of the error file for a request that was not answered."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> str:
    fields = {
        "id": public_id("batch_req_", new_id()),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    # All in ASCII: PostgreSQL keeps neither NUL nor half a surrogate pair, which an id may have.
    return json.dumps(fields, separators=(",", ":"))
