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

from contract.messages.sampling import (
    ANSWER_TOKENS,
    BIAS,
    MAX_ADAPTERS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    RANGES,
    WEIGHT,
)
from contract.messages.tool_calls import CalledFunctions
from controlplane.inference.bodies import (
    Body,
    FirstFault,
    Label,
    at_most,
    refused,
    within,
    without_nul,
)
from controlplane.inference.constraints import Constrained
from controlplane.inference.messages import Message
from controlplane.inference.model_selector import ModelSelector, sticky_of
from controlplane.inference.tools import (
    MAX_TOOLS,
    FunctionTool,
    GivenChoice,
    Tool,
    bounded,
    check_tools,
    chosen,
)

MAX_MESSAGES = 2048
#: Number of choices that `n` may ask for.
MAX_CHOICES = 16
#: Number of prompts in one request to /v1/completions; also of answers to all of them.
MAX_PROMPTS = 64
MAX_LOGIT_BIASES = 1024
MAX_MODEL_CHARS = 200


def _stops(value: str | list[str] | None) -> list[str] | None:
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
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
    AfterValidator(_stops),
]
Bias = Annotated[float, within(BIAS)]
Biases = Annotated[
    Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None,
    at_most(MAX_LOGIT_BIASES),
    AfterValidator(_token_biases),
]
MaxTokens = Annotated[int | None, within(ANSWER_TOKENS)]
Temperature = Annotated[float | None, within(RANGES["temperature"])]
RepetitionPenalty = Annotated[float | None, within(RANGES["repetition_penalty"])]
TopLogprobs = Annotated[int | None, within(RANGES["logprobs"])]
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
#: "" is the base model.
NamedModel = Annotated[str | None, Field(max_length=MAX_MODEL_CHARS)]
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
        """Return whether a stream ends with the usage."""
        is_continuous = self.continuous_usage_stats and self.include_usage is not False
        return bool(self.include_usage or is_continuous)

    @property
    def is_continuous(self) -> bool:
        """Return whether each chunk has the usage so far."""
        return self.shows_usage and bool(self.continuous_usage_stats)


class AdapterPart(Body):
    """One adapter of a blend, named by `name` or `model`."""

    name: ModelName | None = None
    model: ModelName | None = None
    weight: Annotated[float, Field(ge=WEIGHT.least, le=WEIGHT.most)] = 1.0

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


class SamplingBody(Body):
    """The sampling parameters that chats, plain completions and responses have in common."""

    temperature: Temperature = None
    top_p: Annotated[float | None, within(RANGES["top_p"])] = None
    stop: Stops = None
    seed: Annotated[int | None, within(RANGES["seed"])] = None
    presence_penalty: Annotated[float | None, within(RANGES["presence_penalty"])] = None
    frequency_penalty: Annotated[float | None, within(RANGES["frequency_penalty"])] = None
    # Beyond OpenAI's, under the names that other servers of open models use.
    top_k: Annotated[int | None, within(RANGES["top_k"])] = None
    min_p: Annotated[float | None, within(RANGES["min_p"])] = None
    repetition_penalty: RepetitionPenalty = None
    min_tokens: Annotated[int | None, within(RANGES["min_tokens"])] = None
    ignore_eos: bool | None = None
    speculation: Annotated[
        bool | None,
        Field(description="false: draft no tokens of the answer, which is the same either way."),
    ] = None


class GenerationBody(SamplingBody, Constrained):
    """The fields that chat and plain completions have in common."""

    #: The address that takes it.
    endpoint: ClassVar[str]

    model: NamedModel = None
    adapters: Adapters = None
    n: Number = None
    max_tokens: MaxTokens = None
    logit_bias: Biases = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label = None
    store: bool | None = None
    prompt_logprobs: Annotated[int | None, within(RANGES["prompt_logprobs"])] = None
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
        """Return whether the request is served like a batch's: with capacity that others leave."""
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
    """Drop the modes "none" and "auto", which change nothing: there are no `functions` here."""
    return None if value in ("none", "auto") else value


class PromptCacheOptions(Body):
    """Accepted without effect: prompts share what they begin with anyway, within a tenant."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Label = None
    prewarm: Annotated[Any, refused("a request itself fills the cache")] = None
    comparison_response_id: Annotated[
        Any, refused("usage has the cached tokens of each answer")
    ] = None


#: Options of OpenAI's API that ask for a judgement of prompts and answers.
Moderation = Annotated[
    Any, refused("nothing here moderates prompts or answers; leave it out", also_empty=True)
]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    endpoint: ClassVar[str] = "/v1/chat/completions"

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    chat_template_kwargs: TemplateOptions = None
    modalities: Annotated[list[Literal["text"]], FirstFault] | None = None
    metadata: Metadata = None
    service_tier: ServiceTier = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Label = None
    moderation: Moderation = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Label = None
    verbosity: Label = None
    tools: Annotated[
        Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(bounded)
    ] = None
    tool_choice: GivenChoice = None
    functions: Annotated[Any, refused("send tools")] = None
    function_call: Annotated[Any, BeforeValidator(_no_functions), refused("send tool_choice")] = (
        None
    )
    audio: Annotated[Any, refused("the models here write text alone")] = None
    prediction: Annotated[Any, refused("leave it out: the answer is the same")] = None
    web_search_options: Annotated[
        Any, refused("nothing here searches the web", also_empty=True)
    ] = None

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
    max_tokens: Annotated[int | None, within(RANGES["max_tokens"])] = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    best_of: Number = None
    echo: bool | None = None
    suffix: Annotated[Any, refused("the models here continue the prompt alone")] = None
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
