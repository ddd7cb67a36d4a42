"""Turns a row of a dataset into tokens, and marks those that the model learns. No torch here.

A model learns what it would have to write in serving: after exactly the tokens that serving would
give it, the tokens of a learned message up to the one that ends its turn. Both are rendered by
serving's own code (`engine.text`). A template may render a message differently when others follow:
Mistral's moves the system's message into the last user's, Qwen3's leaves out earlier thoughts. Then
one rendering of the whole chat cannot be right for all its messages, and the row becomes several
examples, each as far as it is what serving would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from contract.training.row_messages import Row
from engine.text.chat_rendering import render_chat
from engine.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class RowTokens:
    """A row, or a part of it, as tokens.

    learned  the places in `token_ids` that have a loss, as ranges in order
    """

    token_ids: list[int]
    learned: list[range] = field(default_factory=list)

    @property
    def num_learned(self) -> int:
        return sum(map(len, self.learned))


@dataclass(frozen=True, slots=True)
class _Turn:
    """One learned message: the tokens that serving gives the model, and those it must write."""

    prompt: list[int]
    answer: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.answer


def encode_row(codec: TextCodec, row: Row, *, skip_thoughts: bool = False) -> list[RowTokens]:
    """Return the row as tokens; several when its template does not let one hold them all.

    skip_thoughts  an answer is learned from behind its thought

    Raises PromptError when the template refuses the row, and ValueError when it does not begin the
    assistant's turn as it writes it.
    """
    if not row.messages:
        return [_completion(codec, row)]
    _check_thoughts(codec, row)
    if row.item is not None:
        return [RowTokens(codec.encode_chat(render_chat(codec, row.messages, row.tools)))]
    examples: list[RowTokens] = []
    for index in reversed(row.learned):
        turn = _turn(codec, row, index)
        thought = _thought_length(codec, turn.answer) if skip_thoughts else 0
        learned = range(len(turn.prompt) + thought, len(turn.token_ids))
        if examples and _is_within(turn, examples[-1].token_ids):
            examples[-1].learned.insert(0, learned)
        else:
            examples.append(RowTokens(turn.token_ids, [learned]))
    return examples[::-1]


def _check_thoughts(codec: TextCodec, row: Row) -> None:
    """Raise ValueError for a thought that the chat template leaves out."""
    if codec.takes_thoughts:
        return
    for index, message in enumerate(row.messages):
        if "reasoning_content" in message:
            raise ValueError(
                f"the base's chat template does not know messages[{index - row.num_added}]."
                "reasoning_content: write it into `content`"
            )


def _thought_length(codec: TextCodec, answer: list[int]) -> int:
    """Return how many tokens of an answer are its thought, with the mark at its end."""
    return 0 if codec.thoughts is None else codec.thoughts.thought_length(answer)


def _completion(codec: TextCodec, row: Row) -> RowTokens:
    prompt = codec.encode(row.prompt, add_special_tokens=True)
    answer = codec.encode_next(prompt, row.prompt, row.completion)
    if codec.end_id is not None and answer[-1:] != [codec.end_id]:
        answer.append(codec.end_id)
    return RowTokens(prompt + answer, [range(len(prompt), len(prompt) + len(answer))])


def _turn(codec: TextCodec, row: Row, index: int) -> _Turn:
    before = render_chat(codec, row.messages[:index], row.tools)
    whole = render_chat(codec, row.messages[: index + 1], row.tools, generation_prompt=False)
    _check_system(codec, row, index, before.text)
    if not whole.text.startswith(before.text):
        raise ValueError(
            f"the chat template does not begin messages[{index - row.num_added}] as it begins an "
            "answer"
        )
    prompt, token_ids = codec.encode_chat(before), codec.encode_chat(whole)
    if token_ids[: len(prompt)] == prompt:
        return _Turn(prompt, _without_rest(codec, token_ids[len(prompt) :]))
    # A token has the end of the prompt and the beginning of the answer; in serving there is none.
    answer = codec.encode_chat(codec.rest(whole, before))
    return _Turn(prompt, _without_rest(codec, answer))


def _check_system(codec: TextCodec, row: Row, index: int, text: str) -> None:
    """Raise ValueError when the system alone speaks before an answer, and is left out.

    So does a template that writes the system's message into a user's.
    """
    if any(message["role"] != "system" for message in row.messages[:index]):
        return
    others = [{**each, "content": f"{each['content']}."} for each in row.messages[:index]]
    if render_chat(codec, others, row.tools).text == text:
        raise ValueError(
            "the chat template leaves out a system's message that no user's follows: write it as a "
            "user's"
        )


def _without_rest(codec: TextCodec, answer: list[int]) -> list[int]:
    """Return the answer without the blanks that a template writes after the end of the turn."""
    end = len(answer)
    while end and not codec.is_special(answer[end - 1]) and _is_blank(codec, answer[end - 1]):
        end -= 1
    return answer[:end]


def _is_blank(codec: TextCodec, token_id: int) -> bool:
    return not codec.decode_whole([token_id]).strip()


def _is_within(turn: _Turn, token_ids: list[int]) -> bool:
    """Return whether a longer example shows the model this turn as serving would."""
    return token_ids[: len(turn.prompt) + len(turn.answer)] == turn.token_ids


def row_length(examples: list[RowTokens]) -> int:
    """Return the tokens of the longest example of a row."""
    return max(len(example.token_ids) for example in examples)


def cut(examples: list[RowTokens], max_length: int) -> Iterator[RowTokens]:
    """Yield the examples cut to a length, without those that then have nothing to learn."""
    for example in examples:
        learned = [
            range(span.start, min(span.stop, max_length))
            for span in example.learned
            if span.start < max_length
        ]
        if learned:
            yield RowTokens(example.token_ids[:max_length], learned)
