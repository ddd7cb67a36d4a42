"""Turns the prompts of a DashEngine's user into lists of token ids."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from tokenizers import Tokenizer

from engine.errors import InvalidPrompt
from engine.text.chat_rendering import render_chat
from engine.text.chat_template import PromptError
from engine.text.codec import Beginning, TextCodec

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
    """Turns prompts into token ids. Safe to use from several threads.

    tokenizer  a fast one of Hugging Face; None: there is none, and prompts are token ids already
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # guards `_codec`, which is made for the first chat
        self._codec: TextCodec | None = None

    def read(self, prompt: Prompt) -> tuple[list[int], bool]:
        """Return the prompt's token ids, and whether it is a chat.

        Raises ValueError if it needs a tokenizer and there is none, InvalidPrompt if it is no
        prompt or does not fit the tokenizer's chat template.
        """
        if isinstance(prompt, str):
            self.need_tokenizer("prompts of text")
            ids = list(self._tokenizer(prompt)["input_ids"])
            return ids[Beginning(self._tokenizer.backend_tokenizer).num_doubled(ids) :], False
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise InvalidPrompt(
                f"the prompt is a {type(prompt).__name__}, not text, token ids or the messages of "
                "a chat",
                param="prompts",
            )
        items = list(_plain(prompt))
        if items and isinstance(items[0], Mapping):
            self.need_tokenizer("chats")
            return self._chat_ids(items), True
        return cast(list[int], items), False

    def need_tokenizer(self, what: str) -> None:
        """Raise ValueError if there is no tokenizer; `what` needs it."""
        if self._tokenizer is None:
            raise ValueError(
                f"{what} need a tokenizer, and none was found beside the model: give "
                "DashEngine(tokenizer=…), or use token ids"
            )

    def _chat_ids(self, messages: list[Any]) -> list[int]:
        try:
            codec = self._chat_codec()
            return codec.encode_chat(render_chat(codec, messages))
        except (PromptError, ValueError) as error:
            raise InvalidPrompt(str(error), param="prompts") from error

    def _chat_codec(self) -> TextCodec:
        """Return the codec with the tokenizer's chat template, which its owner may have changed.

        Raises ValueError if it has none.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: give the prompt as text")
        source = self._tokenizer.get_chat_template()
        with self._lock:
            if self._codec is None:
                own = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
                names = self._tokenizer.special_tokens_map
                texts = {name: text for name, text in names.items() if isinstance(text, str)}
                self._codec = TextCodec.of(own, source, texts)
            self._codec = self._codec.with_template(source)
            return self._codec


def _plain(items: Iterable[Any]) -> Iterable[Any]:
    """Return the items of an array or a tensor as a list; anything else unchanged."""
    return items.tolist() if hasattr(items, "tolist") else items
