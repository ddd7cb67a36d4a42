"""The body of POST /v1/responses: its fields, and the unsupported ones.

Responses are not kept, so what refers to an earlier one is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from contract.messages.protocol import GenerateJob
from controlplane.inference.bodies import (
    Body,
    FirstFault,
    Label,
    Replayed,
    refused,
    unsupported,
)
from controlplane.inference.messages import Refusal, check_refusals, readable, which_part
from controlplane.inference.schemas import (
    MAX_MESSAGES,
    Adapters,
    MaxTokens,
    Metadata,
    Moderation,
    NamedModel,
    PromptCacheOptions,
    SamplingBody,
    ServiceTier,
    TopLogprobs,
)
from controlplane.inference.tools import (
    MAX_TOOLS,
    FunctionName,
    check_choice,
    only_functions,
)

_TEXTS = ("input_text", "output_text", "text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class TextPart(Replayed):
    type: Literal["input_text", "output_text", "text"]
    text: str


Part = Annotated[
    Annotated[Annotated[TextPart, Tag("a text")] | Refusal, Discriminator(which_part)],
    readable(*_TEXTS, "refusal"),
]
#: Tokens that truncation auto leaves for an answer without a limit.
DEFAULT_ROOM = 256

Content = str | Annotated[list[Part], FirstFault]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Replayed):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @model_validator(mode="after")
    def _refusals_are_the_assistants(self) -> MessageItem:
        check_refusals(self.role, self.content)
        return self


def _direct(value: Any) -> Any:
    """Drop the caller of a function if it is the model, as it is always here."""
    return None if isinstance(value, dict) and value.get("type") == "direct" else value


NOTHING_CALLS = "only the model itself calls functions here"
Caller = Annotated[Any, BeforeValidator(_direct), refused(NOTHING_CALLS)]
Namespace = Annotated[Any, refused("functions have no namespaces here")]
Async = Annotated[Any, refused("send the call with its result"), Field(alias="async")]


class FunctionCallItem(Replayed):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: FunctionName
    arguments: str
    namespace: Namespace = None
    caller: Caller = None
    async_: Async = None


class FunctionOutputItem(Replayed):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    output: Content
    namespace: Namespace = None
    caller: Caller = None


class ReasoningItem(Replayed):
    """The reasoning of another model before its answer; dropped."""

    type: Literal["reasoning"]


def _kind(value: Any) -> str:
    """Return an item's type; without one it is a message."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else "message"


def _item(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = _kind(value)
    if "id" in value and not value.keys() - {"id", "type"}:
        kind = "item_reference"  # as OpenAI's has no type
    if kind not in _ITEMS:
        raise unsupported(
            f"there are {', '.join(_ITEMS)}", f"is an item of type `{kind[:40]}`, not supported"
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
    """The effort of thinking, for a chat template that knows it; the rest has no effect."""

    effort: Label = None
    summary: Label = None
    generate_summary: Label = None
    mode: Label = None
    context: Label = None


class ResponsesStreamOptions(Body):
    """Accepted without effect: a response's last event has the usage anyway."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _callers(value: Any) -> Any:
    """Drop the callers of a function if the model is among them."""
    return None if isinstance(value, list) and "direct" in value else value


class _FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, refused("send the functions that may be called now")] = None
    output_schema: Annotated[
        Any, refused("describe the output in the function's description", also_empty=True)
    ] = None
    allowed_callers: Annotated[
        Any, BeforeValidator(_callers), refused(NOTHING_CALLS, also_empty=True)
    ] = None
    async_: Annotated[Any, refused("a call waits for its result"), Field(alias="async")] = None


class NamedChoice(Body):
    type: Literal["function"]
    name: FunctionName


class AllowedChoice(Body):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedChoice, BeforeValidator(only_functions)]],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


#: OpenAI's; of those but two nothing is here that they could add.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ImageOptions(Body):
    """Accepted without effect: no input has images."""

    context_compression: Label = None


def _standard(value: Any) -> Any:
    return None if value == "standard" else value


class AccessPrograms(Body):
    cyber: Annotated[Any, BeforeValidator(_standard), refused("there is `standard` alone")] = None


_NOT_KEPT = "responses are not kept: send the whole conversation as input"


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    endpoint: ClassVar[str] = "/v1/responses"

    model: NamedModel = None
    adapters: Adapters = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    top_logprobs: TopLogprobs = None
    text: TextConfig | None = None
    tools: (
        Annotated[
            list[Annotated[_FunctionTool, BeforeValidator(only_functions)]],
            Field(max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None,
        BeforeValidator(check_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Included], FirstFault] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata = None
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Label = None
    service_tier: ServiceTier = None
    access_programs: AccessPrograms | None = None
    image: ImageOptions | None = None
    max_tool_calls: Annotated[
        int | None, Field(ge=0, description="Without effect: it bounds the calls of hosted tools.")
    ] = None
    moderation: Moderation = None
    previous_response_id: Annotated[Any, refused(_NOT_KEPT)] = None
    conversation: Annotated[Any, refused(_NOT_KEPT)] = None
    background: Annotated[Any, refused("wait for the answer, or send a batch")] = None
    prompt: Annotated[Any, refused("prompts are not kept: send instructions and input")] = None
    context_management: Annotated[Any, refused("truncation auto drops the oldest turns")] = None

    @model_validator(mode="after")
    def _results_have_calls(self) -> ResponsesBody:
        called = set()
        for number, item in enumerate(() if isinstance(self.input, str) else self.input):
            if isinstance(item, FunctionCallItem):
                called.add(item.call_id)
            elif isinstance(item, FunctionOutputItem) and item.call_id not in called:
                raise ValueError(f"input: no function_call before item {number} has its call_id")
        return self

    def adjusted(self, job: GenerateJob) -> GenerateJob:
        """Change the job as no chat's body can: let its oldest turns be dropped."""
        if self.truncation != "auto":
            return job
        return dataclasses.replace(job, room=self.max_output_tokens or DEFAULT_ROOM)

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
