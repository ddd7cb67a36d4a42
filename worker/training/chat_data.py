"""Turns chat JSONL into training examples: token ids, and labels on the assistant's tokens.

`contract.chat_rows` defines a row. The chat template of the base's tokenizer renders it; only
tokens that the assistant writes have a loss. Templates rarely mark those, so their spans are found
by rendering the chat up to each assistant message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from contract.chat_rows import MAX_LINE_BYTES, Chat, Problem, read_rows

#: Label of a token without a loss; losses of PyTorch and Hugging Face skip this value.
IGNORED = -100


class DatasetError(ValueError):
    """Raised when a dataset cannot be trained on; the message names the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One chat as tokens."""

    input_ids: list[int]
    labels: list[int]  # the token where the assistant wrote it, IGNORED elsewhere
    is_truncated: bool


def read_chats(path: Path) -> list[Chat]:
    """Return the `messages` of every row; raise DatasetError for a row that is not a chat."""
    chats: list[Chat] = []
    with path.open("rb") as file:
        for row in read_rows(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
            if isinstance(row, Problem):
                raise DatasetError(str(row))
            chats.append(row)
    return chats


def assistant_spans(tokenizer: Any, messages: Chat) -> tuple[str, list[range]]:
    """Return the rendered chat, and the character ranges in it that the assistant writes.

    A range begins where generation would begin and includes the end-of-turn marker. Raises
    ValueError if the template renders the first messages differently when more follow.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True
        )
        turn = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise ValueError(
                f"the chat template renders the messages before messages[{index}] differently when "
                "others follow"
            )
        # Templates put a line break after the end-of-turn marker; the model never writes it.
        spans.append(range(len(prompt), len(turn.rstrip())))
    return text, spans


def encode_chat(tokenizer: Any, messages: Chat, max_length: int) -> Example:
    """Return the chat's tokens, cut to `max_length`, with labels only on the assistant's."""
    text, spans = assistant_spans(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if start < end and any(start in span for span in spans) else IGNORED
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return Example(
        input_ids=encoded["input_ids"][:max_length],
        labels=labels[:max_length],
        is_truncated=len(labels) > max_length,
    )


def load_examples(tokenizer: Any, path: Path, max_length: int) -> list[Example]:
    """Return every row as tokens, without rows that are cut before their first answer token.

    Raises DatasetError as `read_chats` does, and if no row is left.
    """
    examples = []
    for number, messages in enumerate(read_chats(path), start=1):
        try:
            example = encode_chat(tokenizer, messages, max_length)
        except jinja2.TemplateError as error:
            raise DatasetError(f"row {number}: the chat template refuses it: {error}") from error
        except ValueError as error:
            raise DatasetError(f"row {number}: {error}") from error
        if any(label != IGNORED for label in example.labels[1:]):
            examples.append(example)
    if not examples:
        raise DatasetError(f"no row has an answer within max_length={max_length} tokens: raise it")
    return examples


def collate(examples: list[dict[str, list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Make a batch, padded on the right to its longest row; every tensor is [S, T]."""
    width = max(len(example["input_ids"]) for example in examples)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor(
            [example[name] + [fill] * (width - len(example[name])) for example in examples]
        )

    return {
        "input_ids": padded("input_ids", pad_id),
        "labels": padded("labels", IGNORED),
        "attention_mask": padded("attention_mask", 0),
    }
