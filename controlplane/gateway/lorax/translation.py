"""Translate LoRAX's body into a chat's."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from contract.messages.protocol import GenerateJob
from controlplane.errors import ApiError, InvalidRequest
from controlplane.gateway.lorax.schemas import ClassifyBody, GenerateBody, Parameters
from controlplane.inference.bodies import FirstFault
from controlplane.inference.constraints import ResponseFormat
from controlplane.inference.messages import Message
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import (
    MAX_MESSAGES,
    AdapterPart,
    ChatBody,
)
from controlplane.inference.vectors import LabelsBody
from controlplane.infra import finite_json

#: How LoRAX says "no adapter".
NO_ADAPTER = ("", "__base__")

#: Parses `inputs` with apply_chat_template as strictly as a body: no lone surrogates.
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(
    Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FirstFault]
)


def seed_of(parameters: Parameters) -> int | None:
    """Return the seed of the sampling, drawn if none was given: LoRAX tells clients the seed."""
    if not parameters.samples or (parameters.best_of or 1) > 1:
        return None
    seed = parameters.seed
    return secrets.randbits(63) if seed is None else seed


def model_name(adapter_id: str) -> str:
    """Return the model's name here: `invoices/3`, a repository and its version, is `invoices@3`."""
    name, _, number = adapter_id.rpartition("/")
    return f"{name}@{number}" if name and number.isdigit() else adapter_id


def chat_body(body: GenerateBody, *, base_model: str, seed: int | None, stream: bool) -> ChatBody:
    """Return the request as a chat. Without a template its messages are the prompt, which
    `as_raw_text` then sets in their place.

    base_model  the name of what answers without an adapter
    Raises InvalidRequest.
    """
    parameters = body.parameters
    fields: dict[str, Any] = {
        "messages": _messages(body),
        "max_tokens": parameters.max_new_tokens,
        "temperature": _temperature(parameters),
        "top_k": parameters.top_k,
        "top_p": parameters.top_p,
        "repetition_penalty": parameters.repetition_penalty,
        "seed": None if seed is None else seed - 2**64 * (seed >= 2**63),
        "stop": parameters.stop or None,
        "ignore_eos": parameters.ignore_eos_token,
        "n": parameters.best_of,
        "stream": stream,
        # Each token is shown with its log-probability.
        "logprobs": True,
        "top_logprobs": parameters.return_k_alternatives or 0,
        "response_format": _response_format(parameters),
        **_named(parameters, base_model),
    }
    return make_body(ChatBody, **fields)


def labels_body(body: ClassifyBody) -> LabelsBody:
    """Return a request for labels as ours; without an adapter the base model is named."""
    adapter_id = body.parameters.adapter_id
    named = "" if adapter_id in (None, *NO_ADAPTER) else model_name(adapter_id or "")
    return make_body(LabelsBody, model=named, input=body.inputs)


def in_our_words(error: ApiError, parameters: Parameters) -> ApiError:
    """Return the error with TGI's name for the field of a grammar."""
    if parameters.grammar is not None and (error.param or "").startswith("response_format"):
        error.param = "parameters.grammar"
    return error


def as_raw_text(body: GenerateBody) -> Callable[[GenerateJob], GenerateJob]:
    """Return a change to the job for what OpenAI's bodies cannot say."""

    def adjust(job: GenerateJob) -> GenerateJob:
        if body.parameters.apply_chat_template:
            return dataclasses.replace(job, token_details=True)
        return dataclasses.replace(
            job,
            token_details=True,
            messages=None,
            text=body.inputs,
            truncate=body.parameters.truncate,
        )

    return adjust


def _temperature(parameters: Parameters) -> float:
    if not parameters.samples:
        return 0.0
    return 1.0 if parameters.temperature is None else parameters.temperature


def _messages(body: GenerateBody) -> list[Message]:
    if not body.parameters.apply_chat_template:
        return [Message(role="user", content=body.inputs)]
    try:
        inputs = body.inputs.encode()
        finite_json.check_body(inputs)
        return _MESSAGES.validate_json(inputs)
    except (ValueError, InvalidRequest) as error:
        raise InvalidRequest(
            "With apply_chat_template, inputs must be a JSON list of messages.", param="inputs"
        ) from error


def _response_format(parameters: Parameters) -> ResponseFormat | None:
    form = parameters.response_format
    if form is None:
        return parameters.grammar
    if form.schema_ is None:
        return ResponseFormat(type="json_object")
    schema = {"name": "response", "schema": form.schema_}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})


def _named(parameters: Parameters, base_model: str) -> dict[str, Any]:
    merged = parameters.merged_adapters
    if merged is not None:
        parts = [
            AdapterPart(name=model_name(adapter_id), weight=weight)
            for adapter_id, weight in zip(merged.ids, merged.weights, strict=True)
        ]
        for part in parts:
            _known_here(part.called, parameters)
        return {"adapters": parts}
    adapter_id = parameters.adapter_id
    if adapter_id is None or adapter_id in NO_ADAPTER:
        return {"model": base_model}
    return {"model": _known_here(model_name(adapter_id), parameters)}


def _known_here(name: str, parameters: Parameters) -> str:
    """Return a model's name. Raises InvalidRequest for an adapter that only a store has."""
    source = parameters.adapter_source
    if "/" in name and source not in (None, "hub"):
        raise InvalidRequest(
            f"No adapter is read from the source `{source}`: upload it, and give its name as "
            "adapter_id.",
            param="parameters.adapter_source",
        )
    return name
