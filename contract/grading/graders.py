"""Graders as they are asked for: checked here, computed by `controlplane.evaluations.rewards`.

    {"type": "string_check", "name", "input", "reference", "operation"}   eq, ne, like, ilike
    {"type": "text_similarity", "name", "input", "reference", "evaluation_metric"}
    {"type": "score_model", "name", "model", "input": [{"role", "content"}], "range",
     "sampling_params"}                 model: of the installation, or `judge:NAME`
    {"type": "python", "name", "source"}       defines grade(sample, item)
    {"type": "checks", "name", "checks", "expected"}    those of evaluation suites
    {"type": "multi", "name", "graders": {NAME: grader}, "calculate_output"}

All but `checks` are OpenAI's. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from contract.grading.formula import Formula
from contract.grading.templates import check_template, item_paths
from contract.grading.text_metrics import METRICS

MAX_CHARS = 64 * 1024
MAX_GRADERS = 8
MAX_MESSAGES = 32
MAX_COMPLETION_TOKENS = 4096
OPERATIONS = ("eq", "ne", "like", "ilike")
#: Prefix of a `model` that is a judge of the tenant's, an address outside of the installation.
JUDGE = "judge:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,59}", re.ASCII)
_ROLES = ("system", "developer", "user", "assistant")
#: Fields by type, and whether they are needed. `pass_threshold` changes no reward.
_FIELDS: dict[str, dict[str, bool]] = {
    "string_check": {"input": True, "reference": True, "operation": True},
    "text_similarity": {
        "input": True, "reference": True, "evaluation_metric": True, "pass_threshold": False,
    },
    "score_model": {
        "model": True, "input": True, "range": False, "sampling_params": False,
        "pass_threshold": False,
    },
    "python": {"source": True, "image_tag": False},
    "checks": {"checks": True, "expected": False},
    "multi": {"graders": True, "calculate_output": True},
}  # fmt: skip
_NOT_OFFERED = {
    "label_model": "is not offered: write it as score_model",
    "cosine": "is not offered, because there are no embeddings: take fuzzy_match or rouge_l",
    "meteor": "is not offered, because it needs a thesaurus: take gleu or rouge_l",
}


class BadGrader(ValueError):
    """A grader that cannot be used: its `field` has this `problem`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


def check_grader(given: Any, field: str = "grader") -> None:
    """Raise BadGrader, which names the first field that is wrong."""
    try:
        is_long = len(json.dumps(given)) > MAX_CHARS
    except (TypeError, ValueError, RecursionError):
        raise BadGrader(field, "must be JSON") from None
    if is_long:
        raise BadGrader(field, f"must have at most {MAX_CHARS} characters")
    _check(given, field, is_part=False)


def parts_of(grader: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the graders whose scores are computed, by name: a multi's parts, or the one."""
    if grader["type"] == "multi":
        return dict(grader["graders"])
    return {grader.get("name") or grader["type"]: dict(grader)}


def paths_of(grader: Mapping[str, Any]) -> list[str]:
    """Return the paths that a row must have, such as `item.answer`."""
    texts = (text for part in parts_of(grader).values() for text in _templates(part))
    return sorted({path for text in texts for path in item_paths(text)})


def num_models(grader: Mapping[str, Any]) -> int:
    """Return how many models are asked for the reward of one answer."""
    asked = 0
    for part in parts_of(grader).values():
        asked += part["type"] == "score_model"
        for check in part.get("checks") or ():
            asked += isinstance(check, dict) and check.get("type") == "judge"
    return asked


def score_range(part: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and the highest score of a `score_model`."""
    low, high = part.get("range") or (0, 1)
    return float(low), float(high)


def _templates(part: Mapping[str, Any]) -> Iterator[str]:
    for name in ("input", "reference", "expected"):
        value = part.get(name)
        if isinstance(value, str):
            yield value
        for message in value if isinstance(value, list) else ():
            yield text_of(message["content"])


def text_of(content: Any) -> str:
    """Return the text of a checked message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in (content if isinstance(content, list) else [content]))


def _check(given: Any, field: str, *, is_part: bool) -> None:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS or (is_part and kind == "multi"):
        known = ", ".join(name for name in _FIELDS if name != "multi" or not is_part)
        problem = _NOT_OFFERED.get(kind if isinstance(kind, str) else "")
        raise BadGrader(f"{field}.type", problem or f"must be one of {known}")
    fields = _FIELDS[kind]
    for name in given:
        if name not in ("type", "name") and name not in fields:
            raise BadGrader(f"{field}.{name[:60]}", f"is no field of a grader of type {kind}")
    for name, is_needed in fields.items():
        if is_needed and given.get(name) is None:
            raise BadGrader(f"{field}.{name}", "is missing")
    if type(given.get("name")) not in (type(None), str):
        raise BadGrader(f"{field}.name", "must be a string")
    for name in fields:
        if given.get(name) is not None:
            _CHECKS[name](given[name], f"{field}.{name}", given)


def _template(value: Any, field: str, _: Any = None) -> None:
    if not isinstance(value, str):
        raise BadGrader(field, "must be a string")
    try:
        check_template(value)
    except ValueError as error:
        raise BadGrader(field, str(error)) from None


def _input(value: Any, field: str, given: Mapping[str, Any]) -> None:
    if given["type"] != "score_model":
        _template(value, field)
        return
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise BadGrader(field, f"must be a list of 1 to {MAX_MESSAGES} messages")
    for index, message in enumerate(value):
        where = f"{field}.{index}"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadGrader(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        for name in message:
            if name not in ("role", "content") and (name, message[name]) != ("type", "message"):
                raise BadGrader(f"{where}.{name[:60]}", "is no field of a message")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            is_text = not isinstance(part, dict) or part.get("type") in _TEXTS
            if not is_text or not isinstance(text, str):
                raise BadGrader(f"{where}.content", "must be text")
            for name in part if isinstance(part, dict) else ():
                if name not in ("type", "text"):
                    raise BadGrader(f"{where}.content.{name[:60]}", "is no field of a text")
            _template(text, f"{where}.content")


_TEXTS = ("text", "input_text", "output_text")


def _one_of(*known: str) -> Any:
    def check(value: Any, field: str, _: Any) -> None:
        if not isinstance(value, str) or value not in known:
            problem = _NOT_OFFERED.get(value) if isinstance(value, str) else None
            raise BadGrader(field, problem or f"must be one of {', '.join(known)}")

    return check


def _range(value: Any, field: str, _: Any) -> None:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(map(_is_number, value)) or not value[0] < value[1]:
        raise BadGrader(field, "must be two numbers, the lower one first")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9


_PARAMS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "seed": (0, 2**31 - 1),
    "max_completions_tokens": (1, MAX_COMPLETION_TOKENS),
}


def _params(value: Any, field: str, _: Any) -> None:
    if not isinstance(value, dict):
        raise BadGrader(field, "must be an object")
    for name, number in value.items():
        if number is None:
            continue
        if name not in _PARAMS:
            raise BadGrader(f"{field}.{name[:60]}", f"is none of {', '.join(_PARAMS)}")
        low, high = _PARAMS[name]
        if not _is_number(number) or not low <= number <= high:
            raise BadGrader(f"{field}.{name}", f"must be a number from {low} to {high}")


def _source(value: Any, field: str, _: Any) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise BadGrader(field, "must be a string")
    if not re.search(r"^def\s+grade\s*\(", value, re.MULTILINE):
        raise BadGrader(field, "must define grade(sample, item)")


def _image_tag(value: Any, field: str, _: Any) -> None:
    raise BadGrader(field, "is not offered: the sealed process has Python's standard library alone")


def _graders(value: Any, field: str, _: Any) -> None:
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_GRADERS:
        raise BadGrader(field, f"must be an object of 1 to {MAX_GRADERS} graders")
    for name, part in value.items():
        if not _NAME.fullmatch(name):
            raise BadGrader(f"{field}.{name[:60]}", "must be named by letters, digits and _")
        _check(part, f"{field}.{name}", is_part=True)


def _formula(value: Any, field: str, given: Mapping[str, Any]) -> None:
    if not isinstance(value, str):
        raise BadGrader(field, "must be a string")
    try:
        Formula(value, given["graders"])
    except ValueError as error:
        raise BadGrader(field, str(error)) from None


def _text(value: Any, field: str, _: Any) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 255:
        raise BadGrader(field, "must be 1 to 255 characters")


def _list(value: Any, field: str, _: Any) -> None:
    if not isinstance(value, list) or not value:
        raise BadGrader(field, "must be a list")


def _threshold(value: Any, field: str, _: Any) -> None:
    if not _is_number(value):
        raise BadGrader(field, "must be a number")


_CHECKS: dict[str, Any] = {
    "input": _input,
    "reference": _template,
    "expected": _template,
    "operation": _one_of(*OPERATIONS),
    "evaluation_metric": _one_of(*METRICS),
    "model": _text,
    "range": _range,
    "sampling_params": _params,
    "source": _source,
    "image_tag": _image_tag,
    "checks": _list,
    "graders": _graders,
    "calculate_output": _formula,
    "pass_threshold": _threshold,
}
