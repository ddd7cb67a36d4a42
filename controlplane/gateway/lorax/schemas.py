"""The bodies that LoRAX's clients send, and the fields that are refused by name.

Source: the GenerateParameters of LoRAX's router and the types of lorax-client 0.6.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from contract.messages.sampling import MAX_ADAPTERS, MAX_STOPS, RANGES, WEIGHT
from controlplane.inference.bodies import Body, FirstFault, refused
from controlplane.inference.constraints import ResponseFormat
from controlplane.inference.json_schema import checked_schema
from controlplane.inference.schemas import (
    MaxTokens,
    ModelName,
    RepetitionPenalty,
    StopString,
    Temperature,
)

MAX_BEST_OF = 8
MAX_ALTERNATIVES = 20
UINT64 = 2**64 - 1


def _linear(value: str | None) -> str | None:
    if value not in (None, "linear"):
        raise PydanticCustomError(
            "unsupported", "is supported as linear: adapters are not merged but summed exactly"
        )
    return value


class MergedAdapters(Body):
    """A blend. It is summed for each token, exactly; so nothing is dropped and no sign elected."""

    ids: Annotated[list[ModelName], Field(min_length=1, max_length=MAX_ADAPTERS)]
    weights: Annotated[
        list[Annotated[float, Field(ge=WEIGHT.least, le=WEIGHT.most)]],
        Field(max_length=MAX_ADAPTERS),
    ]
    merge_strategy: Annotated[str | None, AfterValidator(_linear)] = None
    density: Annotated[float | None, Field(ge=0, le=1)] = None
    majority_sign_method: Literal["total", "frequency"] | None = None

    @model_validator(mode="after")
    def _one_weight_each(self) -> MergedAdapters:
        if len(self.ids) != len(self.weights):
            raise ValueError("weights: must be as many as ids")
        return self


class JsonFormat(Body):
    type: Literal["json_object"]
    # A dict, checked: the field's name would hide a method of BaseModel.
    schema_: Annotated[
        Annotated[dict[str, Any], AfterValidator(checked_schema)] | None, Field(alias="schema")
    ] = None


def _without_nulls(value: Any) -> Any:
    """Drop nulls: clients send every field that they know, as null where nothing is said."""
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if inner is not None}
    return value


def _valued(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() != {"type", "value"}:
        raise ValueError("must have a type (json, regex or json_schema) and a value")
    return value


class Parameters(Body):
    """The `parameters` of a body."""

    adapter_id: Annotated[str | None, Field(max_length=200)] = None
    adapter_source: Literal["hub", "local", "s3", "pbase"] | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Annotated[str | None, Field(max_length=1000)] = None
    do_sample: bool = False
    temperature: Temperature = None
    top_k: Annotated[int | None, Field(gt=0, le=RANGES["top_k"].most)] = None
    top_p: Annotated[float | None, Field(gt=0, lt=1)] = None
    typical_p: Annotated[Any, refused("send top_p")] = None
    repetition_penalty: RepetitionPenalty = None
    seed: Annotated[int | None, Field(ge=0, le=UINT64)] = None
    best_of: Annotated[int | None, Field(gt=0, le=MAX_BEST_OF)] = None
    max_new_tokens: MaxTokens = None
    ignore_eos_token: bool = False
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    return_full_text: bool = False
    truncate: MaxTokens = None
    watermark: Annotated[Any, refused("leave it out")] = None
    details: bool = False
    decoder_input_details: Annotated[Any, refused("/v1/completions has prompt_logprobs")] = None
    return_k_alternatives: Annotated[int | None, Field(gt=0, le=MAX_ALTERNATIVES)] = None
    apply_chat_template: bool = False
    response_format: JsonFormat | None = None
    # TGI's, whose clients call the same addresses.
    grammar: Annotated[ResponseFormat | None, BeforeValidator(_valued)] = None
    frequency_penalty: Annotated[Any, refused("send repetition_penalty")] = None
    top_n_tokens: Annotated[Any, refused("send return_k_alternatives")] = None

    @model_validator(mode="before")
    @classmethod
    def _nulls(cls, value: Any) -> Any:
        return _without_nulls(value)

    @model_validator(mode="after")
    def _go_together(self) -> Parameters:
        if self.adapter_id and self.merged_adapters is not None:
            raise ValueError("merged_adapters: cannot be combined with adapter_id")
        if (self.best_of or 1) > 1 and not self.samples:
            raise ValueError("best_of: you must use sampling when it is above 1")
        if (self.best_of or 1) > 1 and self.seed is not None:
            raise ValueError("seed: must not be set when best_of is above 1")
        if self.truncate is not None and self.apply_chat_template:
            raise ValueError("truncate: cannot be combined with apply_chat_template")
        if self.grammar is not None and self.response_format is not None:
            raise ValueError("grammar: cannot be combined with response_format: give one of them")
        return self

    @property
    def samples(self) -> bool:
        """Return whether tokens are drawn; else each is the likeliest.

        As LoRAX decides it: by what differs from the defaults, whatever `do_sample` says.
        """
        if self.temperature == 0:
            return False
        is_warped = self.temperature not in (None, 1.0) or self.top_k or self.top_p
        return self.do_sample or bool(is_warped)


class ClassifyParameters(Body):
    """The `parameters` of a request for labels: what answers it."""

    adapter_id: Annotated[str | None, Field(max_length=200)] = None
    adapter_source: Literal["hub", "local", "s3", "pbase"] | None = None
    api_token: Annotated[str | None, Field(max_length=1000)] = None


class ClassifyBody(Body):
    """POST /classify and /classify_batch."""

    inputs: str | Annotated[list[str], FirstFault]
    parameters: ClassifyParameters = ClassifyParameters()


class GenerateBody(Body):
    """POST /generate and /generate_stream; on / also with `stream`."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: Parameters = Parameters()
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _nulls(cls, value: Any) -> Any:
        return _without_nulls(value)
