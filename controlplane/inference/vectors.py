"""Requests that are answered from their inputs alone: embeddings, and the labels of classifiers.

A worker computes one vector for each input. Whatever holds for a plain completion holds here; only
the job's task and the answer differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from contract.messages.pooling import unpack
from contract.messages.protocol import GenerateJob, Task, TokenEvent, Usage
from controlplane.errors import InvalidRequest, Unavailable
from controlplane.inference.access import ServedModel
from controlplane.inference.answers import Json
from controlplane.inference.bodies import Body, FirstFault, Label
from controlplane.inference.model_selector import ModelSelector, sticky_of
from controlplane.inference.schemas import CompletionBody, ModelName, NamedModel, TokenIds

#: Inputs of one request, as OpenAI's API has it.
MAX_INPUTS = 2048
MAX_DIMENSIONS = 65_536


class VectorBody(Body):
    """The fields that embeddings and labels have in common."""

    endpoint: ClassVar[str]
    task: ClassVar[Task]
    #: As bodies of generation have them: such a request is no blend and has no stream.
    adapters: ClassVar[None] = None
    stream: ClassVar[None] = None
    model: NamedModel
    input: Any
    user: Label = None

    @model_validator(mode="after")
    def _inputs_are_few(self) -> VectorBody:
        if not 1 <= len(self.inputs()) <= MAX_INPUTS:
            raise ValueError(f"input: a request must have 1 to {MAX_INPUTS} inputs")
        return self

    def inputs(self) -> list[Any]:
        """Return the inputs, each as text or as token ids."""
        is_one = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if is_one else self.input

    def selector(self) -> ModelSelector:
        """Return the model that the body names."""
        return ModelSelector.model(self.model or "", sticky=sticky_of(self))

    def completion(self) -> CompletionBody:
        """Return the completion that computes the same prompts, and nothing behind them."""
        return CompletionBody.model_construct(
            model=self.model, prompt=self.inputs(), max_tokens=0, store=False
        )

    def as_task(self, job: GenerateJob) -> GenerateJob:
        """Return the completion's job with this body's task."""
        return dataclasses.replace(job, task=self.task)

    def answer(self, model: ServedModel, events: Sequence[TokenEvent]) -> Json:
        """Return the answer's body."""
        raise NotImplementedError

    def _vectors(self, events: Sequence[TokenEvent]) -> list[str]:
        """Return each input's vector, packed. Raises Unavailable if one is missing."""
        found = {event.index: event.vector for event in events if event.vector is not None}
        if len(found) < len(self.inputs()):
            raise Unavailable("The worker that answered is of an older version.", retry_after_s=5)
        return [found[index] for index in sorted(found)]


class EmbeddingsBody(VectorBody):
    """POST /v1/embeddings."""

    endpoint: ClassVar[str] = "/v1/embeddings"
    task: ClassVar[Task] = Task.EMBED

    model: ModelName
    input: str | Annotated[list[str], FirstFault] | TokenIds | Annotated[list[TokenIds], FirstFault]
    dimensions: Annotated[int | None, Field(ge=1, le=MAX_DIMENSIONS)] = None
    encoding_format: Literal["float", "base64"] | None = None

    def as_task(self, job: GenerateJob) -> GenerateJob:
        return dataclasses.replace(job, task=self.task, dimensions=self.dimensions)

    def answer(self, model: ServedModel, events: Sequence[TokenEvent]) -> Json:
        packed = self._vectors(events)
        is_packed = self.encoding_format == "base64"
        usage = _usage_of(events)
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": vector if is_packed else unpack(vector),
                }
                for index, vector in enumerate(packed)
            ],
            "model": model.name,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }


class LabelsBody(VectorBody):
    """A request for labels, which `/classify` makes of LoRAX's body."""

    endpoint: ClassVar[str] = "/classify"
    task: ClassVar[Task] = Task.CLASSIFY

    input: str | Annotated[list[str], FirstFault]

    def answer(self, model: ServedModel, events: Sequence[TokenEvent]) -> Json:
        scores = map(unpack, self._vectors(events))
        return {"labels": [_ranked(model.labels, own) for own in scores]}


def check_task(model: ServedModel, task: str) -> None:
    """Raise InvalidRequest if the model cannot do the task, and say what it can."""
    if task == Task.CLASSIFY and not (model.labels and len(model.parts) == 1):
        raise InvalidRequest(
            f"`{model.name}` has no classifier's head: it answers chats and gives embeddings. "
            "Name an adapter of PEFT's task SEQ_CLS.",
            param="model",
            code="unsupported_task",
        )
    if task == Task.GENERATE and model.labels:
        raise InvalidRequest(
            f"`{model.name}` is a classifier with {len(model.labels)} labels and "
            "generates no text: send the text to /classify, or to /v1/embeddings for its vector.",
            param="model",
            code="unsupported_task",
        )


def _usage_of(events: Sequence[TokenEvent]) -> Usage:
    return next((event.usage for event in events if event.usage is not None), Usage())


def _ranked(labels: Sequence[str], scores: Sequence[float]) -> list[Json]:
    """Return the labels with their probabilities, the likeliest first."""
    told = [{"label": own, "score": score} for own, score in zip(labels, scores, strict=True)]
    return sorted(told, key=lambda each: -float(str(each["score"])))
