"""Which claims of a base model are another model's."""

from __future__ import annotations

import pytest

from contract.adapters.base_claim import claim_problems, repositories

QWEN = ["Qwen/Qwen2.5-7B-Instruct"]
COMMIT, OTHER = "a" * 40, "b" * 40


def fields(
    claimed: object, known: list[str], *, name: str = "prod", commit: object = None
) -> list[str]:
    raw = {"base_model_name_or_path": claimed, "revision": commit}
    found = claim_problems(raw, name=name, known_names=known, revision=COMMIT)
    assert all("accept_base_mismatch" in problem.message for problem in found)
    return [problem.field for problem in found]


@pytest.mark.parametrize(
    "claimed",
    [
        "Qwen/Qwen2.5-7B-Instruct",
        "qwen/qwen2.5-7b-instruct",
        "qwen2.5-7b-instruct",
        "prod",
        "mirror/Qwen2.5-7B-Instruct",
        "unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit",
        "unsloth/qwen2.5-7b-instruct-bnb-4bit",
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        # They say nothing for certain.
        *(None, "", 7, [], "/data/checkpoints/base", "./out", "../../etc/passwd", "C:\\models\\x"),
        *("a/b/c", "~/models/llama", "Qwen/", "with space", "é", "x" * 400),
    ],
)
def test_claims_that_pass(claimed: object) -> None:
    assert fields(claimed, QWEN) == []


@pytest.mark.parametrize(
    "claimed",
    [
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "mistral-7b",
        "gpt2",
    ],
)
def test_another_model_is_a_mismatch(claimed: str) -> None:
    assert fields(claimed, QWEN) == ["base_model_name_or_path"]


def test_a_base_of_unknown_origin_is_compared_by_its_name_if_that_is_a_models() -> None:
    assert fields("meta-llama/Llama-3.1-8B", [], name="prod") == []
    assert fields("meta-llama/Meta-Llama-3.1-8B", [], name="llama-3.1-8b") == []
    assert fields("Qwen/Qwen2.5-7B", [], name="llama-3.1-8b") == ["base_model_name_or_path"]


def test_commits_are_compared() -> None:
    assert fields(QWEN[0], QWEN, commit=COMMIT) == []
    assert fields(QWEN[0], QWEN, commit="main") == []
    assert fields(QWEN[0], QWEN, commit=OTHER) == ["revision"]
    assert fields("/a/folder", QWEN, commit=OTHER) == []


def test_names_that_a_folder_tells() -> None:
    cache = "/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/abc"
    assert repositories(cache) == QWEN
    assert repositories("/model") == []
