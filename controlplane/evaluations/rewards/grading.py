"""RunGrader: the rewards of a step's samples. Start reading at `RunGrader.grade`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from django.db import connection

from contract.grading.formula import Formula
from contract.grading.graders import JUDGE, parts_of, score_range, text_of
from contract.grading.templates import Missing, filled
from contract.training.rewards import Rewards
from controlplane.errors import ApiError, InvalidRequest
from controlplane.evaluations import asking, checks
from controlplane.evaluations.judge import JudgeFailed, NoMark, answer_of, judge_get, mark
from controlplane.evaluations.rewards import scoring
from controlplane.evaluations.rewards.scoring import Scores
from controlplane.inference.parsing import make_body
from controlplane.inference.schemas import ChatBody
from controlplane.training.models import TrainingRun
from controlplane.training.runs.rewards.grading import Graded, Sample

T = TypeVar("T")

#: Judges that are asked at a time.
_AT_ONCE = 8
_MAX_TOKENS = 256
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ASK = "Reply with one number from {low:g} to {high:g}, and nothing else."
_FIELD = "hyperparameters.grader"


class RunGrader:
    """The `training.runs.rewards.grading.Grader` of this installation."""

    def check(self, grader: dict[str, Any]) -> None:
        """Check the judges and checks that a grader names. Raises InvalidRequest, NotFound."""
        parts = parts_of(grader)
        for name, part in parts.items():
            place = f"{_FIELD}.graders.{name}" if grader["type"] == "multi" else _FIELD
            if part["type"] == "checks":
                has_expected = "expected" in part
                checks.checked(part["checks"], f"{place}.checks", has_expected=has_expected)
                for number, check in enumerate(part["checks"]):
                    if check["type"] == "judge":
                        judge_get(name=check["judge"], param=f"{place}.checks.{number}.judge")
            elif part["type"] == "score_model" and part["model"].startswith(JUDGE):
                judge_get(name=part["model"].removeprefix(JUDGE), param=f"{place}.model")

    def grade(self, run: TrainingRun, grader: dict[str, Any], samples: Sequence[Sample]) -> Graded:
        """Return the rewards; a sample without a score gets the grader's lowest.

        Raises ApiError: asking again helps after 5xx and 429.
        """
        parts = parts_of(grader)
        found = {name: _scores(run, part, samples) for name, part in parts.items()}
        problems = [problem for _, problem in found.values() if problem]
        scores = {
            name: [_lowest(parts[name]) if each is None else each for each in own]
            for name, (own, _) in found.items()
        }
        rewards = next(iter(scores.values()))
        if grader["type"] == "multi":
            formula = Formula(grader["calculate_output"], parts)
            rewards = [
                _value(formula, {name: scores[name][place] for name in scores}, problems)
                for place in range(len(samples))
            ]
        places = range(len(samples))
        errors = sum(any(own[place] is None for own, _ in found.values()) for place in places)
        figures = {}
        if grader["type"] == "multi":
            figures = {f"reward_{name}": _mean(own) for name, own in scores.items()}
        if errors:
            figures["grader_errors"] = float(errors)
        return Graded(Rewards(rewards, figures), problems[0] if problems else "")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _lowest(part: Mapping[str, Any]) -> float:
    return score_range(part)[0] if part["type"] == "score_model" else 0.0


def _value(formula: Formula, scores: Mapping[str, float], problems: list[str]) -> float:
    try:
        return formula.value(scores)
    except (ArithmeticError, ValueError) as error:
        problems.append(f"calculate_output has no value: {error}")
        return 0.0


def _scores(run: TrainingRun, part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    match part["type"]:
        case "string_check":
            return scoring.string_check(part, samples)
        case "text_similarity":
            return scoring.text_similarity(part, samples)
        case "python":
            return scoring.python(part, samples)
        case "checks":
            return _checks(part, samples)
    if part["model"].startswith(JUDGE):
        return _by_judge(part, samples)
    return _by_model(run, part, samples)


def _checks(part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    """Score by a suite's checks, whose mean counts; judges are asked for theirs."""
    judges = {
        check["judge"]: judge_get(name=check["judge"])
        for check in part["checks"]
        if check["type"] == "judge"
    }

    def score(sample: Sample) -> float | None:
        found = scoring.plain_checks(part, sample)
        for number, check in enumerate(part["checks"]):
            if check["type"] == "judge":
                found[number] = mark(
                    judges[check["judge"]],
                    rubric=check.get("rubric", ""),
                    prompt=sample.item.get("messages", []),
                    expected=scoring.expected_of(part, sample),
                    output=sample.text,
                )
        return checks.mean_of(found)

    return _marked(samples, score, at_once=_AT_ONCE if judges else 1)


def _by_judge(part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    judge = judge_get(name=part["model"].removeprefix(JUDGE))
    params = _params(part)

    def score(sample: Sample) -> float | None:
        return _number(part, answer_of(judge, _messages(part, sample), **params))

    return _marked(samples, score, at_once=_AT_ONCE)


def _marked(
    samples: Sequence[Sample], score: Callable[[Sample], float | None], *, at_once: int
) -> Scores:
    """Score each sample by judges. Raises ApiError if one may answer later, or never will."""
    problems: list[str] = []

    def marked(sample: Sample) -> float | None:
        try:
            return score(sample)
        except NoMark as error:
            problems.append(f"a judge: {error}")
        except JudgeFailed as error:
            kind = InvalidRequest if error.is_final else ApiError
            raise kind(f"A judge failed: {error}") from error
        return None

    return _each(marked, samples, at_once), problems[0] if problems else ""


def _each(work: Callable[[Sample], T], samples: Iterable[Sample], at_once: int) -> list[T]:
    if at_once == 1:
        return [work(sample) for sample in samples]
    contexts = ((copy_context(), sample) for sample in samples)
    with ThreadPoolExecutor(at_once, "judges") as threads:
        return list(threads.map(lambda each: each[0].run(work, each[1]), contexts))


def _by_model(run: TrainingRun, part: Mapping[str, Any], samples: Sequence[Sample]) -> Scores:
    """Score by a model of the installation; its requests are the tenant's, limited and billed."""
    caller = asking.caller_of(asking.principal_of(run.tenant), part["model"])
    params = _params(part)
    bodies = [
        make_body(
            ChatBody,
            model=caller.model.name,
            messages=_messages(part, sample),
            store=False,
            **params,
        )
        for sample in samples
    ]
    connection.close()
    scores: list[float | None] = []
    problem = ""
    for text in asking.texts(caller, bodies):
        try:
            scores.append(_number(part, text))
        except NoMark as error:
            scores.append(None)
            problem = problem or f"{part['model']}: {error}"
    return scores, problem


def _messages(part: Mapping[str, Any], sample: Sample) -> list[dict[str, str]]:
    values = scoring.values_of(sample)
    low, high = score_range(part)
    messages = []
    for message in part["input"]:
        try:
            content = filled(text_of(message["content"]), values)
        except Missing as missing:
            content = f"({missing} is missing)"
        messages.append({"role": message["role"], "content": content})
    asked = _ASK.format(low=low, high=high)
    if messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{asked}"
    else:
        messages.append({"role": "user", "content": asked})
    return messages


def _params(part: Mapping[str, Any]) -> dict[str, Any]:
    given = {k: v for k, v in (part.get("sampling_params") or {}).items() if v is not None}
    most = given.pop("max_completions_tokens", _MAX_TOKENS)
    return {"temperature": 0, "max_tokens": most, **given}


def _number(part: Mapping[str, Any], text: str) -> float:
    """Return the last number of an answer. Raises NoMark if there is none, or out of range."""
    low, high = score_range(part)
    found = _NUMBER.findall(text)
    value = float(found[-1]) if found else math.nan
    if not low <= value <= high:
        raise NoMark(f"It gave no number from {low:g} to {high:g}.", is_final=True)
    return value
