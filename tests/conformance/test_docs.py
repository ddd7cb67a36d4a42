"""The examples in docs/ do what they say: each is run against the live platform.

A block of `sh` that calls curl and every block of `python` is run by itself, in the order of the
page and in one folder for all, which has a file notes.txt. OPENAI_BASE_URL, OPENAI_API_KEY,
LORIKEET_URL and their like are set, and Python finds `client` made. Each must end without an error
and say something. The adapters they name are `tests.live_seed.DOCUMENTED`, whose engine echoes; the
page's base model stands for a real engine with a random model. A block after the line
`<!-- not run: why -->` is left out.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import Served
from tests.tiny_base import ROOMY_NAME

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = ("api.md", "evaluation.md", "from-openai.md", "from-lorax.md", "from-vllm.md")
BASE_MODEL = "smollm2-135m-instruct"
PREAMBLE = "from openai import OpenAI\nclient = OpenAI()\n"
_BLOCK = re.compile(r"^(<!-- not run:[^\n]*-->\n+)?```(sh|python)\n(.*?)^```$", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples() -> list[Example]:
    found = []
    for page in PAGES:
        path = DOCS / page
        text = path.read_text() if path.exists() else ""
        for match in _BLOCK.finditer(text):
            is_left_out, language, code = match.groups()
            if is_left_out or (language == "sh" and "curl" not in code):
                continue
            line = text.count("\n", 0, match.start()) + 1
            found.append(Example(page, line, language, code))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    (made / "notes.txt").write_text("notes of a meeting\n")
    return made


def test_there_are_examples_of_both_kinds() -> None:
    assert {example.language for example in examples()} == {"sh", "python"}


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_runs(served: Served, folder: Path, example: Example) -> None:
    code = example.text.replace(BASE_MODEL, ROOMY_NAME)
    argv = (
        [sys.executable, "-c", PREAMBLE + code]
        if example.language == "python"
        else ["bash", "-euo", "pipefail", "-c", code]
    )
    env = {
        **os.environ,
        "OPENAI_BASE_URL": served.base_url,
        "OPENAI_API_KEY": served.key(),
        **dict.fromkeys(("BASE_URL", "LORIKEET_URL"), served.url),
        **dict.fromkeys(("API_KEY", "LORIKEET_API_KEY"), served.key()),
    }
    done = subprocess.run(
        argv, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{example} says nothing"
