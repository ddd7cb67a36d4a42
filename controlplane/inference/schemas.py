"""The bodies that the gateway takes: OpenAI's fields, their ranges, and unsupported ones.

Unknown fields are refused, which catches typing errors, except inside `messages`, which clients
send back with fields of their own. Fields without effect here (`user`, `metadata`, …) are checked;
fields for what the platform cannot do are refused unless they are empty.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from contract.tool_calls import CalledFunctions
from controlplane.inference.bodies import Body, FirstFault, Replayed, at_most, without_nul
from controlplane.inference.constraints import Constrained
from controlplane.inference.model_selector import ModelSelector, sticky_of
from controlplane.inference.tools import (
    MAX_TOOLS,
    FunctionTool,
    Tool,
    ToolCalls,
    ToolChoice,
    bounded,
    check_tools,
    chosen,
)

MAX_MESSAGES = 2048
MAX_STOPS = 4
#: Of `n`.
MAX_CHOICES = 16
#: Of one request to /v1/completions; also the most answers to all of them.
MAX_PROMPTS = 64
MAX_STOP_CHARS = 500
MAX_LOGIT_BIASES = 1024
MAX_MODEL_CHARS = 200
#: Of one blend; the engine's own bound.
MAX_ADAPTERS = 8
MAX_WEIGHT = 100.0
INT64 = 2**63 - 1


def _refuse(value: Any) -> Any:
    if value in (None, False, "", [], {}):
        return None
    raise PydanticCustomError("unsupported", "is not supported")


Unsupported = Annotated[Any, AfterValidator(_refuse)]


def _stops(value: Any) -> Any:
    """Make a list of a single stop string."""
    return [value] if isinstance(value, str) else value


def _token_biases(value: dict[str, float] | None) -> dict[str, float] | None:
    for key in value or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise PydanticCustomError("value_error", "must have token ids as its keys")
    return value


Number = Annotated[int | None, Field(ge=1, le=MAX_CHOICES)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_stops)
]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None,
    at_most(MAX_LOGIT_BIASES),
    AfterValidator(_token_biases),
]
Temperature = Annotated[float | None, Field(ge=0, le=2)]
Share = Annotated[float | None, Field(ge=0, le=1)]
Penalty = Annotated[float | None, Field(ge=-2, le=2)]
MaxTokens = Annotated[int | None, Field(ge=1, le=10_000_000)]
#: Off where it is -1, as vLLM and SGLang write it, or 0.
TopK = Annotated[int | None, Field(ge=-1, le=1_000_000)]
Seed = Annotated[int | None, Field(ge=-INT64 - 1, le=INT64)]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
#: "" is the base model.
NamedModel = Annotated[str | None, Field(max_length=MAX_MODEL_CHARS)]
Label = Annotated[str | None, Field(max_length=512)]
#: The tiers of OpenAI's clients; `GenerationBody.tier` is what they get.
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
MetadataKey = Annotated[str, Field(max_length=64), AfterValidator(without_nul)]
MetadataValue = Annotated[str, Field(max_length=512), AfterValidator(without_nul)]
MAX_METADATA = 16
Metadata = Annotated[
    dict[MetadataKey, MetadataValue] | None, Field(max_length=MAX_METADATA), at_most(MAX_METADATA)
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def shows_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        is_continuous = self.continuous_usage_stats and self.include_usage is not False
        return bool(self.include_usage or is_continuous)

    @property
    def is_continuous(self) -> bool:
        """Whether each chunk has the usage so far."""
        return self.shows_usage and bool(self.continuous_usage_stats)


class AdapterPart(Body):
    """One adapter of a blend, named by `name` or `model`."""

    name: ModelName | None = None
    model: ModelName | None = None
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0

    @model_validator(mode="after")
    def _one_name(self) -> AdapterPart:
        if (self.name is None) == (self.model is None):
            raise ValueError("name: required, or model in its place")
        return self

    @property
    def field(self) -> str:
        return "model" if self.name is None else "name"

    @property
    def called(self) -> str:
        return self.name or self.model or ""


Adapters = Annotated[
    Annotated[list[AdapterPart], Field(min_length=1, max_length=MAX_ADAPTERS)] | None,
    Field(description="A blend: the weighted sum of these adapters, exactly."),
]


Speculates = Annotated[
    bool | None,
    Field(description="false: draft no tokens of the answer, which is the same either way."),
]


class GenerationBody(Constrained):
    """The fields that chat and plain completions have in common."""

    #: The address that takes it.
    endpoint: ClassVar[str]

    model: NamedModel = None
    adapters: Adapters = None
    temperature: Temperature = None
    top_p: Share = None
    n: Number = None
    max_tokens: MaxTokens = None
    stop: Stops = None
    seed: Seed = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Biases = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label = None
    store: bool | None = None
    # Beyond OpenAI's, under the names that other servers of open models use.
    top_k: TopK = None
    min_p: Share = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    ignore_eos: bool | None = None
    speculation: Speculates = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _names_something(self) -> GenerationBody:
        if self.model is None and not self.adapters:  # "" is the base, as LoRAX's clients say it
            raise PydanticCustomError("missing", "model: required")
        return self

    def selector(self) -> ModelSelector:
        """Return the models and adapters that the body names."""
        if not self.adapters:
            return ModelSelector.model(self.model or "", sticky=sticky_of(self))
        label = self.model or "+".join(part.called for part in self.adapters)[:MAX_MODEL_CHARS]
        names = tuple(part.called for part in self.adapters)
        weights = tuple(part.weight for part in self.adapters)
        params = tuple(f"adapters.{i}.{part.field}" for i, part in enumerate(self.adapters))
        if not self.model:
            return ModelSelector(label=label, names=names, weights=weights, params=params)
        return ModelSelector(
            label=label,
            names=(self.model, *names),
            weights=(None, *weights),
            params=("model", *params),
        )

    @property
    def is_flex(self) -> bool:
        """Whether the request is served as a batch's: with the capacity that others leave."""
        return self.tier == "flex"

    @property
    def tier(self) -> str:
        """Return the service tier that the answer names: one of two, whatever was asked for."""
        return "flex" if getattr(self, "service_tier", None) == "flex" else "default"

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not available in a stream")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream set to true")
        return self


def _text_part(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "text":
        raise no_text(value["type"])
    return value


def no_text(kind: str) -> PydanticCustomError:
    """Return the error for a part of a message that is an image or the like."""
    return PydanticCustomError(
        "unsupported",
        "is a part of type {kind}: the models here read text alone. Send parts of type text",
        {"kind": f"`{kind[:40]}`"},
    )


class TextPart(Replayed):
    type: Literal["text"]
    text: str


ContentPart = Annotated[TextPart, BeforeValidator(_text_part)]


def _role(value: Any) -> Any:
    if value == "function":
        raise PydanticCustomError(
            "unsupported",
            "does not support function messages: send role tool, with the tool_call_id",
        )
    return value


class Message(Replayed):
    role: Annotated[
        Literal["developer", "system", "user", "assistant", "tool"], BeforeValidator(_role)
    ]
    content: str | Annotated[list[ContentPart], FirstFault] | None = None
    name: Label = None
    refusal: str | None = None
    audio: Unsupported = None
    tool_calls: ToolCalls = None
    tool_call_id: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        says_else = self.role == "assistant" and (self.tool_calls or self.refusal)
        if self.content is None and not says_else:
            raise PydanticCustomError("missing", "content: required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: allowed only in an assistant's message")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: required in a tool's message, and allowed only there")
        return self

    def rendered(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates of open models have no developer role; OpenAI's models treat both alike.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


#: Variables that the template is given anyway, or that clients must not set.
_TEMPLATES_OWN = frozenset(
    ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")
)
TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateValue = bool | Annotated[int, Field(ge=-(2**31), lt=2**31)] | Annotated[
    str, Field(max_length=1000)
] | None  # fmt: skip


def _templates_own(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in _TEMPLATES_OWN or name.endswith("_token"):
            raise PydanticCustomError(
                "value_error", "must not set what the template is given anyway"
            )
    return options


TemplateOptions = Annotated[
    Annotated[
        dict[TemplateName, TemplateValue], Field(max_length=16), AfterValidator(_templates_own)
    ]
    | None,
    at_most(16),
]


def _no_functions(value: Any) -> Any:
    return None if value in ("none", "auto") else _refuse(value)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    endpoint: ClassVar[str] = "/v1/chat/completions"

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    chat_template_kwargs: TemplateOptions = None
    modalities: Annotated[list[Literal["text"]], FirstFault] | None = None
    metadata: Metadata = None
    service_tier: ServiceTier = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Label = None
    verbosity: Label = None
    tools: Annotated[
        Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(bounded)
    ] = None
    tool_choice: ToolChoice | None = None
    functions: Unsupported = None
    function_call: Annotated[Any, AfterValidator(_no_functions)] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _tools_fit_together(self) -> ChatBody:
        check_tools(self.tools or [])
        tools, _ = self.callable_tools()
        form = self.constraint
        if tools and form is not None and form.schema is None:
            raise ValueError(f"{form.field}: cannot be combined with tools; a JSON schema can")
        called: set[str] = set()
        for number, message in enumerate(self.messages):
            called |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise ValueError(
                    f"messages.{number}.tool_call_id: no earlier message has this tool call"
                )
        return self

    def callable_tools(self) -> tuple[list[FunctionTool], str | None]:
        """Return the tools that the answer may call, and the job's `tool_choice`."""
        return chosen(self.tools or [], self.tool_choice)

    def rendered_messages(self) -> tuple[dict[str, Any], ...]:
        """Return messages for the chat template; a tool's message has its function's name."""
        messages = tuple(message.rendered() for message in self.messages)
        called = CalledFunctions()
        for message in messages:
            called.add(message.get("tool_calls", ()))
            if "tool_call_id" in message:
                message["name"] = called.name_of(message["tool_call_id"])
        return messages

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: allowed only with logprobs set to true")
        return self


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], FirstFault]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    endpoint: ClassVar[str] = "/v1/completions"

    prompt: (
        str | Annotated[list[str], FirstFault] | TokenIds | Annotated[list[TokenIds], FirstFault]
    )
    max_tokens: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Number = None
    echo: bool | None = None
    suffix: Unsupported = None
    service_tier: ServiceTier = None
    metadata: Metadata = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt

    @model_validator(mode="after")
    def _prompts_are_few(self) -> CompletionBody:
        number = len(self.prompts())
        if not 1 <= number <= MAX_PROMPTS:
            raise ValueError(f"prompt: a request must have 1 to {MAX_PROMPTS} prompts")
        if number * (self.n or 1) > MAX_PROMPTS:
            raise ValueError(f"n: prompts times n must be at most {MAX_PROMPTS}")
        return self

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: must be equal to n")
        return self

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 is allowed only with echo or prompt_logprobs")
        return self
