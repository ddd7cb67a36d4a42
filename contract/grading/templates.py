"""Templates of graders: `{{ item.answer }}` of the row, `{{ sample.output_text }}` of the answer.

A path goes through objects and lists: `{{ item.lines[0].total }}`. What is not text is written as
JSON. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: What a sample has. `output_json` is null where the answer is not JSON.
SAMPLE = ("output_text", "output_json")
_PLACE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"(item|sample)((?:\.[^\s.\[\]{}]+|\[\d{1,6}\])+)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")

Path = tuple[Any, ...]


class Missing(LookupError):
    """The row or the answer has nothing at a path; the message is the path."""


def check_template(text: str) -> None:
    """Raise ValueError, which says what is wrong with a template."""
    for place in _PLACE.findall(text):
        found = _PATH.fullmatch(place.strip())
        if found is None:
            raise ValueError("must name item.… or sample.… between {{ and }}")
        path = _steps(found[2])
        if found[1] == "sample" and path[0] not in SAMPLE:
            raise ValueError(f"names sample.{path[0]}; a sample has {' and '.join(SAMPLE)}")


def item_paths(text: str) -> Iterator[str]:
    """Yield the paths that a template takes of the row, such as `item.answer`."""
    for place in _PLACE.findall(text):
        if place.strip().startswith("item"):
            yield place.strip()


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Return a checked template with its values; `values` has `item` and `sample`.

    Raises Missing.
    """
    return _PLACE.sub(lambda found: _text(value_at(found[1].strip(), values)), text)


def value_at(path: str, values: Mapping[str, Any]) -> Any:
    """Return the value at a checked path. Raises Missing."""
    found = _PATH.fullmatch(path)
    assert found is not None
    value = values[found[1]]
    try:
        for step in _steps(found[2]):
            if not isinstance(value, dict if isinstance(step, str) else list):
                raise Missing(path)
            value = value[step]
    except (KeyError, IndexError):
        raise Missing(path) from None
    return value


def sample_of(text: str) -> dict[str, Any]:
    """Return the sample of an answer's text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    return {"output_text": text, "output_json": value}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _steps(path: str) -> Path:
    return tuple(name or int(index) for name, index in _STEP.findall(path))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
