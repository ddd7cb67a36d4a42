"""Turns the prompts of a DashEngine's user into lists of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from engine.errors import InvalidPrompt

# Text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list; raises ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    # Iterating over a mapping gives its keys. A tokenizer's result is one ("input_ids", …).
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}, not text, token ids, the messages of a chat, "
            "or a list of such"
        )
    items = list(_plain(prompts))
    if items and isinstance(items[0], Integral | Mapping):
        return [cast(Prompt, items)]
    return items


class PromptReader:
    """Turns prompts into token ids.

    tokenizer  None: there is none, and prompts are token ids already
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids.

        Raises ValueError if it needs a tokenizer and there is none, InvalidPrompt if it is no
        prompt or does not fit the tokenizer's chat template.
        """
        if isinstance(prompt, str):
            self.need_tokenizer("prompts of text")
            return list(self._tokenizer(prompt)["input_ids"])
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise InvalidPrompt(
                f"the prompt is a {type(prompt).__name__}, not text, token ids or the messages of "
                "a chat",
                param="prompts",
            )
        items = list(_plain(prompt))
        if items and isinstance(items[0], Mapping):
            self.need_tokenizer("chats")
            return self._chat_ids(items)
        return cast(list[int], items)

    def need_tokenizer(self, what: str) -> None:
        """Raise ValueError if there is no tokenizer; `what` needs it."""
        if self._tokenizer is None:
            raise ValueError(
                f"{what} need a tokenizer, and none was found beside the model: give "
                "DashEngine(tokenizer=…), or use token ids"
            )

    def _chat_ids(self, messages: list[Any]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program and may raise anything
            raise InvalidPrompt(
                f"the tokenizer's chat template refuses the chat: {error}", param="prompts"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(items: Iterable[Any]) -> Iterable[Any]:
    """Return the items of an array or a tensor as a list; anything else unchanged."""
    return items.tolist() if hasattr(items, "tolist") else items
