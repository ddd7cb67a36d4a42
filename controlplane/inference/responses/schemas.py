"""The body of POST /v1/responses: its fields, and the unsupported ones.

Responses are not kept, so what refers to an earlier one is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from contract.protocol import GenerateJob
from controlplane.inference.bodies import Body, FirstFault, Replayed
from controlplane.inference.schemas import (
    MAX_MESSAGES,
    Adapters,
    Label,
    MaxTokens,
    Metadata,
    NamedModel,
    Penalty,
    Seed,
    ServiceTier,
    Share,
    Speculates,
    Stops,
    Temperature,
    TopK,
    Unsupported,
    no_text,
)
from controlplane.inference.tools import MAX_TOOLS

_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        raise no_text(kind)
    return value


class _TextPart(Replayed):
    type: Literal["input_text", "output_text", "text"]
    text: str


TextPart = Annotated[_TextPart, BeforeValidator(_part)]
#: Tokens that truncation auto leaves for an answer without a limit.
DEFAULT_ROOM = 256

Content = str | Annotated[list[TextPart], FirstFault]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Replayed):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Replayed):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: str
    arguments: str
    namespace: Unsupported = None
    caller: Unsupported = None


class FunctionOutputItem(Replayed):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    output: Content


class ReasoningItem(Replayed):
    """The reasoning of another model before its answer; dropped."""

    type: Literal["reasoning"]


def _kind(value: Any) -> str:
    """Return an item's type; without one it is a message."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"


def _item(value: Any) -> Any:
    if isinstance(value, dict) and _kind(value) not in _ITEMS:
        raise PydanticCustomError(
            "unsupported",
            "is an item of type {kind}, which is not supported: there are {known}",
            {"kind": f"`{_kind(value)[:40]}`", "known": ", ".join(_ITEMS)},
        )
    return value


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
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
    """Accepted without effect: the models here do not reason apart from their answer."""

    effort: Label = None
    summary: Label = None
    generate_summary: Label = None


class ResponsesStreamOptions(Body):
    """Accepted without effect: a response's last event has the usage anyway."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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

    model: NamedModel = None
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
    truncation: Literal["auto", "disabled"] | None = None
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
    top_k: TopK = None
    min_p: Share = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    ignore_eos: bool | None = None
    speculation: Speculates = None
    min_tokens: Annotated[int | None, Field(ge=0, le=10_000_000)] = None

    def adjusted(self, job: GenerateJob) -> GenerateJob:
        """Change the job as no chat's body can: let its oldest turns be dropped."""
        if self.truncation != "auto":
            return job
        return dataclasses.replace(job, room=self.max_output_tokens or DEFAULT_ROOM)

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
