"""The bodies of requests to /v1/fine_tuning/jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from contract.grading.graders import BadGrader, check_grader
from contract.ranges import Range
from contract.training.job import METHODS, RANGES, defaults_of
from controlplane.gateway.fine_tuning.services import JobForm
from controlplane.inference.bodies import Body, at_most, refused, within, without_nul
from controlplane.inference.schemas import Metadata

MAX_EXTRAS = 20
Auto = Literal["auto"]
FileName = Annotated[str, Field(max_length=100)]


def _offered(value: str) -> str:
    if value not in METHODS:
        *others, last = METHODS
        known, named = f"{', '.join(others)} or {last}", value[:40]
        raise PydanticCustomError(
            "unsupported",
            "must be {known}; `{named}` is not known",
            {"known": known, "named": named},
        )
    return value


#: Bounds of the learning rate, as multiples of the default one.
_RATE = RANGES["learning_rate"]
_DEFAULT = defaults_of("supervised").learning_rate
_SAMPLES = defaults_of("reinforcement").samples or 0
#: Bounds of `compute_multiplier`, so that there are 2 to 64 samples.
_COMPUTE = Range(RANGES["samples"].least / _SAMPLES, RANGES["samples"].most / _SAMPLES)
_MULTIPLIER = Range(_RATE.least / _DEFAULT, _RATE.most / _DEFAULT)


class HyperparametersBody(Body):
    """OpenAI's hyperparameters; null and "auto" are the same."""

    n_epochs: Annotated[float, within(RANGES["epochs"])] | Auto | None = None
    batch_size: Annotated[int, within(RANGES["batch_size"])] | Auto | None = None
    learning_rate_multiplier: Annotated[float, within(_MULTIPLIER)] | Auto | None = None

    def given(self, method: str) -> dict[str, Any]:
        """Return those with a value, as the trainer names them."""
        rate = self.learning_rate_multiplier
        if isinstance(rate, int | float):
            rate = min(max(rate * defaults_of(method).learning_rate, _RATE.least), _RATE.most)
        found = {"epochs": self.n_epochs, "batch_size": self.batch_size, "learning_rate": rate}
        return {name: value for name, value in found.items() if value not in (None, "auto")}


class DpoHyperparametersBody(HyperparametersBody):
    beta: Annotated[float, within(RANGES["beta"])] | Auto | None = None

    def given(self, method: str) -> dict[str, Any]:
        beta = {} if self.beta in (None, "auto") else {"beta": self.beta}
        return super().given(method) | beta


class ReinforcementHyperparametersBody(HyperparametersBody):
    """OpenAI's; `compute_multiplier` multiplies the answers that are sampled for a prompt."""

    compute_multiplier: Annotated[float, within(_COMPUTE)] | Auto | None = None
    eval_interval: Annotated[int, within(RANGES["eval_steps"])] | Auto | None = None
    eval_samples: Literal["auto", 1] | None = None
    reasoning_effort: Literal["default"] | None = None

    def given(self, method: str) -> dict[str, Any]:
        found = super().given(method)
        if isinstance(self.compute_multiplier, int | float):
            found["samples"] = max(2, round(self.compute_multiplier * _SAMPLES))
        if isinstance(self.eval_interval, int):
            found["eval_steps"] = self.eval_interval
        return found


class SupervisedBody(Body):
    hyperparameters: HyperparametersBody | None = None


class DpoBody(Body):
    hyperparameters: DpoHyperparametersBody | None = None


def _graded(value: dict[str, Any]) -> dict[str, Any]:
    try:
        check_grader(value, "")
    except BadGrader as error:
        place = error.field.removeprefix(".")
        raise ValueError(f"{place}: {error.problem}" if place else error.problem) from None
    return value


class ReinforcementBody(Body):
    grader: Annotated[dict[str, Any], AfterValidator(_graded)]
    hyperparameters: ReinforcementHyperparametersBody | None = None
    response_format: Annotated[
        Any, refused("answers are sampled freely: grade their schema by a grader of type checks")
    ] = None


class MethodBody(Body):
    """The method of training."""

    type: Annotated[str, AfterValidator(_offered)]
    supervised: SupervisedBody | None = None
    dpo: DpoBody | None = None
    reinforcement: ReinforcementBody | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> MethodBody:
        for name in METHODS:
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"{name}: the method is {self.type}, leave it out")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("type: reinforcement needs the field reinforcement, with its grader")
        return self

    @property
    def hyperparameters(self) -> HyperparametersBody | None:
        own: SupervisedBody | DpoBody | ReinforcementBody | None = getattr(self, self.type)
        return own.hyperparameters if own else None


def _are_ours(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in _OPENAIS:
            raise ValueError(f"{name}: give it as {_OPENAIS[name]}")
    return value


#: The trainer's hyperparameters that OpenAI's jobs do not have; the service checks them.
_OPENAIS = {
    "epochs": "n_epochs",
    "batch_size": "batch_size",
    "learning_rate": "learning_rate_multiplier",
    "seed": "seed",
    "method": "method.type",
    "grader": "method.reinforcement.grader",
}
Extras = Annotated[dict[str, Any], at_most(MAX_EXTRAS), AfterValidator(_are_ours)]


class FineTuningJobBody(Body):
    """POST /v1/fine_tuning/jobs."""

    model: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(without_nul)]
    training_file: FileName
    validation_file: FileName | None = None
    suffix: Annotated[str | None, Field(min_length=1, max_length=64)] = None
    hyperparameters: HyperparametersBody | None = None
    method: MethodBody | None = None
    seed: Annotated[int, within(RANGES["seed"])] | None = None
    metadata: Metadata = None
    integrations: Annotated[Any, refused("webhooks and the job's events tell the same")] = None
    lorikeet: Extras | None = None

    @model_validator(mode="after")
    def _says_it_once(self) -> FineTuningJobBody:
        if self.hyperparameters is not None and self._of_method is not None:
            raise ValueError("hyperparameters: give them in method alone")
        is_rewarded = self.method is not None and self.method.type == "reinforcement"
        if not is_rewarded and "beta" in (self.lorikeet or {}):
            raise ValueError("lorikeet.beta: give it as method.dpo.hyperparameters.beta")
        return self

    @property
    def _of_method(self) -> HyperparametersBody | None:
        return self.method.hyperparameters if self.method else None

    def form(self) -> JobForm:
        of_method = self._of_method
        found = of_method or self.hyperparameters
        method = self.method.type if self.method else "supervised"
        given = found.given(method) if found else {}
        if method != "supervised":
            given["method"] = method
        if self.method and self.method.reinforcement:
            given["grader"] = self.method.reinforcement.grader
        if self.seed is not None:
            given["seed"] = self.seed
        return JobForm(
            model=self.model,
            training_file=self.training_file,
            validation_file=self.validation_file,
            suffix=self.suffix,
            hyperparameters=given | (self.lorikeet or {}),
            place=f"method.{method}.hyperparameters" if of_method else "hyperparameters",
            metadata=self.metadata,
        )
