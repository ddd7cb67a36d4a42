"""The body of POST /v1/responses: what is taken, and what is refused by name.

Responses are not kept, so what refers to an earlier one is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from controlplane.inference.bodies import Body, FirstFault
from controlplane.inference.schemas import (
    MAX_MESSAGES,
    Adapters,
    Label,
    MaxTokens,
    Metadata,
    ModelName,
    Penalty,
    Seed,
    ServiceTier,
    Share,
    Stops,
    Temperature,
    Unsupported,
)
from controlplane.inference.tools import MAX_TOOLS

_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output")


def _part(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in (*_TEXT_PARTS, None):
        raise PydanticCustomError("unsupported", "is of a type that is not supported")
    return value


class _TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    # The client's own objects carry them back.
    annotations: Any = None
    logprobs: Any = None


TextPart = Annotated[_TextPart, BeforeValidator(_part)]
Content = str | Annotated[list[TextPart], FirstFault]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Label = None
    status: Label = None
    phase: Label = None


class FunctionCallItem(Body):
    """What an earlier answer called."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: str
    arguments: str
    id: Label = None
    status: Label = None
    namespace: Unsupported = None
    caller: Unsupported = None
    parsed_arguments: Any = None


class FunctionOutputItem(Body):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    output: Content
    id: Label = None
    status: Label = None


def _kind(value: Any) -> str:
    """Which item it is: without a type, a message."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"


def _item(value: Any) -> Any:
    if isinstance(value, dict) and _kind(value) not in _ITEMS:
        raise PydanticCustomError("unsupported", "is of a type that is not supported")
    return value


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionOutputItem, Tag("function_call_output")],
        Discriminator(_kind),
    ],
    BeforeValidator(_item),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    # Checked where a chat's is.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_comes_with_its_type(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema: required with type json_schema, and only with it")
        if self.type == "json_schema" and self.name is None:
            raise PydanticCustomError("missing", "name: required")
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Label = None


class Reasoning(Body):
    """Taken and of no effect: the models here do not reason apart from their answer."""

    effort: Label = None
    summary: Label = None
    generate_summary: Label = None


class ResponsesStreamOptions(Body):
    include_obfuscation: bool | None = None


def _tool(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in ("function", None):
        raise PydanticCustomError("unsupported", "is of a type that is not supported")
    return value


class _FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Unsupported = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class ResponsesBody(Body):
    """POST /v1/responses."""

    endpoint: ClassVar[str] = "/v1/responses"

    model: ModelName | None = None
    adapters: Adapters = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: Share = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    text: TextConfig | None = None
    tools: (
        Annotated[
            list[Annotated[_FunctionTool, BeforeValidator(_tool)]], Field(max_length=MAX_TOOLS)
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            FirstFault,
        ]
        | None
    ) = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata = None
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None
    service_tier: ServiceTier = None
    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: Unsupported = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None
    # Beyond OpenAI's, as in a chat.
    seed: Seed = None
    stop: Stops = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    top_k: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    min_p: Share = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
