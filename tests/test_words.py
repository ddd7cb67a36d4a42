"""Words that shipped code must not use, and how its docstrings and comments must begin.

CONTRIBUTING.md says how to write; the lists are here. ruff's D401 checks the mood of docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Packages that must be clean.
FINISHED = (
    "bench",
    "cli",
    "contract",
    "controlplane",
    "demo",
    "deploy",
    "engine",
    "kernels",
    "lora_dash",
    "worker",
)

#: Calques and fillers that readers have to decode.
PHRASES = (
    "anew",
    "for good",
    "for so",
    "gone on",
    "go on",
    "goes on",
    "going on",
    "meanwhile",
    "of which",
    "so long",
    "so many",
    "so much",
    "went on",
    "what of",
    "whose it is",
)
#: Pictures of our own for packages, layers and entrances.
METAPHORS = ("doors?", "floors", "houses?", "rooms", "this room")
_BANNED = re.compile(rf"\b({'|'.join((*PHRASES, *METAPHORS))})\b", re.IGNORECASE)
_RIDDLE = re.compile(r"(What|Whose|Where|How|Whether)\b")
_OF = re.compile(r"Of\b", re.IGNORECASE)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    yield first.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comments, with the number of its first line."""
    start, last, parts = 0, -1, list[str]()
    was_alone = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = token.line.lstrip().startswith("#")
        if parts and not (is_alone and was_alone and line == last + 1):
            yield start, " ".join(parts)
            parts = []
        if not parts:
            start = line
        parts.append(token.string.lstrip("#:! "))
        last, was_alone = line, is_alone
    if parts:
        yield start, " ".join(parts)


def _defects(source: str) -> list[str]:
    """Return the defects of one file's words, each as "LINE: what is wrong"."""
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    found = [
        (node.lineno, f"a docstring begins with {match[0]}")
        for node in docstrings
        if (match := _RIDDLE.match(node.value.lstrip()))
    ]
    comments = list(_comments(source))
    found += [(line, "a comment begins with Of") for line, text in comments if _OF.match(text)]
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for line, text in [*comments, *strings]:
        plain = " ".join(text.split())
        found += [(line, f"says {match[0]!r}") for match in _BANNED.finditer(plain)]
    return [f"{line}: {defect}" for line, defect in sorted(found)]


def _finished() -> Iterator[Path]:
    for package in FINISHED:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "migrations" not in path.parts:
                yield path


def all_defects() -> list[str]:
    """Return the defects of all finished packages, each as "FILE:LINE: what is wrong"."""
    return [
        f"{path.relative_to(ROOT)}:{defect}"
        for path in _finished()
        for defect in _defects(path.read_text())
    ]


def test_finished_packages_use_plain_words() -> None:
    assert all_defects() == []


@pytest.mark.parametrize(
    ("source", "defect"),
    [
        ('"""What a worker needs."""\n', "1: a docstring begins with What"),
        ('class A:\n    """Whose turn."""\n', "2: a docstring begins with Whose"),
        ('def f():\n    """\n    Whether so."""\n', "2: a docstring begins with Whether"),
        ("x = 1  # of one request\n", "1: a comment begins with Of"),
        ("#: Of one request.\nx = 1\n", "1: a comment begins with Of"),
        ("x = 1  # Seconds.\n# Of one request.\n", "2: a comment begins with Of"),
        ("# The run goes\n# on later.\n", "1: says 'goes on'"),
        ('def f():\n    """Try it\n    anew."""\n', "2: says 'anew'"),
        ('raise ValueError(f"{n} rows, of which 2 are bad")\n', "1: says 'of which'"),
        ('x = (\n    "wait for so "\n    "many rows"\n)\n', "2: says 'for so'"),
        ("# Rooms above this one.\n", "1: says 'Rooms'"),
    ],
)
def test_a_bad_sample_is_found(source: str, defect: str) -> None:
    assert defect in _defects(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Settings of a worker, and what they mean."""\n',
        "# One of the rows.\n# Of the others, none is read.\n",
        'x = "it is gone"  # The floor of a division.\n',
        'class A:\n    """The answer\'s tokens, whether or not they are sent."""\n',
        "room_bytes = 1  # There is room for one page.\n",
    ],
)
def test_a_plain_sample_passes(source: str) -> None:
    assert _defects(source) == []
