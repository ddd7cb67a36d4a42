"""The scores of graders that compute alone: texts compared, checks of suites, a tenant's Python."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.conf import settings

from contract.grading.templates import Missing, filled, sample_of
from contract.grading.text_metrics import similarity
from controlplane.errors import InvalidRequest, Unavailable
from controlplane.evaluations import checks
from controlplane.infra import sealed_child
from controlplane.training.runs.rewards.grading import Sample

log = logging.getLogger(__name__)

#: The score of each sample, None where there is none; and the first problem, or "".
Scores = tuple[list[float | None], str]

_MODULE = "contract.grading.python_process"
_MEMORY_BYTES = 256 << 20
#: Seconds of CPU time for the samples of a step together, and for one by itself.
_CPU_S, _ONE_CPU_S = 20, 2
_WALL_PER_CPU = 4
_ANSWER_BYTES = 1 << 20
_TRIES = 2


def values_of(sample: Sample) -> dict[str, Any]:
    """Return what templates are filled with."""
    return {"item": sample.item, "sample": sample_of(sample.text)}


def of_each(samples: Sequence[Sample], score: Callable[[Mapping[str, Any]], float]) -> Scores:
    """Score each sample; one that lacks what a template names gets 0."""
    found: list[float | None] = []
    for sample in samples:
        try:
            found.append(score(values_of(sample)))
        except Missing:
            found.append(0.0)
    return found, ""


def string_check(part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    def score(values: Mapping[str, Any]) -> float:
        text, reference = (filled(part[name], values) for name in ("input", "reference"))
        match part["operation"]:
            case "eq":
                return float(text == reference)
            case "ne":
                return float(text != reference)
            case "like":
                return float(reference in text)
        return float(reference.casefold() in text.casefold())

    return of_each(samples, score)


def text_similarity(part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    metric = part["evaluation_metric"]
    return of_each(
        samples,
        lambda values: similarity(
            metric, filled(part["input"], values), filled(part["reference"], values)
        ),
    )


def expected_of(part: Mapping[str, Any], sample: Sample) -> str:
    """Return the answer that a grader of checks compares with; "" if the row has none."""
    try:
        return filled(part.get("expected", ""), values_of(sample))
    except Missing:
        return ""


def python(part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    """Score by a tenant's source: all together, and if that goes wrong each by itself."""
    try:
        return _python(part["source"], samples, _CPU_S)
    except (sealed_child.OverBounds, sealed_child.Broken) as error:
        problem = f"a grader of type python was ended: {error}"
        if len(samples) == 1:
            return [None], problem
    scores: list[float | None] = []
    for sample in samples:
        try:
            scores += _python(part["source"], [sample], _ONE_CPU_S)[0]
        except (sealed_child.OverBounds, sealed_child.Broken):
            scores.append(None)
    return scores, problem


def _python(source: str, samples: Sequence[Sample], cpu_s: int) -> Scores:
    bounds = sealed_child.Bounds(
        memory_bytes=_MEMORY_BYTES,
        cpu_s=cpu_s,
        wall_s=_WALL_PER_CPU * cpu_s,
        answer_bytes=_ANSWER_BYTES,
    )
    for left in reversed(range(_TRIES)):
        with tempfile.TemporaryFile() as file:
            for sample in samples:
                file.write(json.dumps(values_of(sample)).encode() + b"\n")
            file.flush()
            file.seek(0)
            try:
                ended = sealed_child.run_sealed(
                    _MODULE,
                    {"source": source},
                    [file],
                    environment=settings.TRAINER_ENVIRONMENT,
                    bounds=bounds,
                )
                return _read(ended.answer, len(samples))
            except sealed_child.Lost as error:
                log.warning("a grader's process was lost: %s", error)
                if not left:
                    raise Unavailable("The graders' processes are ended from outside.") from error
    raise AssertionError("unreachable")


def _read(answer: Mapping[str, Any], number: int) -> Scores:
    """Read a sealed process's answer, which is a stranger's. Raises Broken."""
    if answer.get("refused") is True:
        raise InvalidRequest(
            "Graders of type python do not run here, because the trainer's kernel has no seccomp: "
            "take another type."
        )
    scores, error = answer.get("scores"), answer.get("error")
    if not isinstance(scores, list) or len(scores) != number or not isinstance(error, str):
        raise sealed_child.Broken("its answer has another form")
    if any(type(each) not in (int, float, type(None)) for each in scores):
        raise sealed_child.Broken("a score is no number")
    problem = "".join(char if char.isprintable() else " " for char in error[:200])
    return scores, problem and f"a grader of type python failed: {problem}"


def plain_checks(part: Mapping[str, Any], sample: Sample) -> list[float | None]:
    """Return the scores of a suite's checks; None for those of judges."""
    return checks.scores(part["checks"], sample.text, expected_of(part, sample))
