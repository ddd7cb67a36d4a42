"""A row's part follows from its prompt alone, so that it stays in it while a dataset grows."""

from __future__ import annotations

import pytest

from contract.training.data_split import first_prompt_digest, is_validation, normalised_prompt
from contract.training.row_messages import Row, read_row


def chat(prompt: str, answer: str = "a", system: str = "s") -> Row:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "b"},
    ]
    return read_row({"messages": messages})


ROWS = [chat(f"prompt {number}") for number in range(2000)]


def kept_back(rows: list[Row], share: float, salt: str = "salt") -> set[str]:
    return {normalised_prompt(row) for row in rows if is_validation(row, share, salt)}


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_about_the_share_is_kept_back(share: float) -> None:
    # Five standard deviations of 2000 draws; which rows they are is fixed by the salt.
    assert len(kept_back(ROWS, share)) == pytest.approx(2000 * share, abs=112 * (0 < share < 1))


def test_rows_keep_their_part_while_others_are_added() -> None:
    assert kept_back(ROWS[:500], 0.2) == kept_back(ROWS, 0.2) & kept_back(ROWS[:500], 1.0)
    assert kept_back(ROWS, 0.1) < kept_back(ROWS, 0.2)
    assert kept_back(ROWS, 0.1) != kept_back(ROWS, 0.1, "another")


def test_the_same_prompt_in_other_words_is_in_the_same_part() -> None:
    same = [
        chat("Where is  Köln?"),
        chat(" where IS\nköln? ", answer="b", system="t"),
        chat("Where is Ko\u0308ln?"),
    ]
    assert len({first_prompt_digest(row, "x") for row in same}) == 1
    assert first_prompt_digest(chat("Where is Bonn?")) != first_prompt_digest(same[0])
    completion = read_row({"prompt": "WHERE is Köln?", "completion": "There."})
    assert first_prompt_digest(completion) == first_prompt_digest(same[0])


def test_what_the_system_says_is_the_prompt_where_no_user_speaks() -> None:
    def answered(system: str) -> Row:
        said = [{"role": "system", "content": system}, {"role": "assistant", "content": "a"}]
        return read_row({"messages": said})

    assert first_prompt_digest(answered("Be kind.")) == first_prompt_digest(answered("be  KIND."))
    assert first_prompt_digest(answered("Be kind.")) != first_prompt_digest(answered("Be brief."))


def test_rows_keep_their_part_over_a_hundred_appends() -> None:
    """As in a dataset's versions: each adds rows at the end, and the salt is the dataset's id."""
    sides: dict[str, bool] = {}
    for end in range(20, 2001, 20):
        of_version = {
            normalised_prompt(row): is_validation(row, 0.1, "dataset") for row in ROWS[:end]
        }
        assert sides.items() <= of_version.items()
        sides = of_version
    assert 150 < sum(sides.values()) < 250
