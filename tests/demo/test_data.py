"""The sample data is what its script writes, is held out honestly, and is judged fairly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.data import generate, score

DATA = Path(generate.__file__).parent


@pytest.mark.parametrize("name", sorted(generate.files()))
def test_committed_file_is_what_the_script_writes(name: str) -> None:
    assert (DATA / name).read_text(encoding="utf-8") == generate.files()[name]


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def user_texts(name: str) -> set[str]:
    return {
        message["content"]
        for row in rows(name)
        for message in row["messages"]  # type: ignore[attr-defined]
        if message["role"] == "user"
    }


@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_has_300_rows_and_20_prompts_that_training_never_sees(tenant: str) -> None:
    assert len(rows(f"{tenant}.jsonl")) == 300
    heldout = user_texts(f"{tenant}.heldout.jsonl")
    assert len(heldout) == 20
    assert not heldout & user_texts(f"{tenant}.jsonl")


def test_held_out_vendors_are_new() -> None:
    trained = (DATA / "acme.jsonl").read_text(encoding="utf-8")
    assert not [row for row in score.heldout("acme") if row["expected"]["vendor"] in trained]


def test_training_answers_score_full_marks() -> None:
    for row in rows("acme.jsonl"):
        answer = row["messages"][-1]["content"]  # type: ignore[index]
        assert all(score.invoice_fields(answer, json.loads(answer)).values())
    for row in rows("globex.jsonl"):
        assert all(score.style_markers(row["messages"][-1]["content"]).values())  # type: ignore[index]


EXPECTED = {
    "vendor": "Tulip Foods",
    "invoice_number": "G-902",
    "date": "2026-12-18",
    "currency": "GBP",
    "total": 1623.5,
    "items": 6,
}


def test_finds_json_among_chatter_and_compares_values_not_spelling() -> None:
    answer = (
        "Sure {here}! ```json\n"
        '{"vendor": "TULIP foods ", "invoice_number": "G-902", "date": "2026-12-18",'
        ' "currency": "gbp", "total": "£1,623.50", "items": 6.0}\n```'
    )
    assert all(score.invoice_fields(answer, EXPECTED).values())


@pytest.mark.parametrize(
    "answer",
    ["", "The total is 1623.50 pounds.", "{", "{}", '{"items": true}', "[1, 2]", '{"total": "-"}'],
)
def test_an_answer_without_the_fields_has_none_right(answer: str) -> None:
    assert not any(score.invoice_fields(answer, EXPECTED).values())


def test_wrong_values_are_wrong() -> None:
    answer = json.dumps(EXPECTED | {"date": "18.12.2026", "total": 1623.51, "items": 5})
    right = score.invoice_fields(answer, EXPECTED)
    assert [name for name, is_right in right.items() if not is_right] == ["date", "total", "items"]


def test_style_needs_each_marker_in_its_place() -> None:
    answer = "1. Ahoy, friend!\n2. Fair winds, your Globex crew. Bye"
    assert score.style_markers(answer) == {"greeting": False, "steps": True, "sign_off": False}
    assert score.share([score.style_markers(answer)]) == pytest.approx(1 / 3)
