"""ControlTokens: encodes special tokens of the chat template, but not those that a message quotes.

A tokenizer turns every special token's text into a control token, whoever wrote it: a message that
contains `<|im_end|>` would end its own turn and could continue as the system. Three steps prevent
this. `guard` breaks up the text of special tokens in the messages. After rendering, only the
template's special tokens are intact; `seal` replaces them by random aliases and restores the
messages. `encode` reads the result with a tokenizer whose only special tokens are these aliases, in
one call, so that the text around them is tokenized as usual.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer


class ControlTokens:
    """Prevents messages from writing control tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Random, so that no message can contain an alias; none is shown, not even to the template.
        secret = secrets.token_hex(16)
        # Letters and digits, which a template's `trim` or `tojson` does not change. It need not be
        # secret: it is removed after the template's control tokens were replaced.
        self._guard = f"g{secrets.token_hex(8)}"
        settings = json.loads(tokenizer.to_str())
        added: dict[str, int] = {}
        self._alias_of: dict[str, str] = {}
        self._has_variants = False
        words = set()  # those that are read only if they are no part of a word
        for number, token in enumerate(settings["added_tokens"]):
            if token["special"] and token["content"]:
                # A token that is matched after normalization has spellings that cannot be listed.
                self._has_variants |= token["normalized"]
                # In brackets, so that it is no part of a word beside it.
                alias = f"<{secret}{number:06x}>"
                self._alias_of[token["content"]] = alias
                if token["single_word"]:
                    words.add(token["content"])
                token["content"] = alias
            added[token["content"]] = token["id"]
        self._sealed_tokenizer = sealed = Tokenizer.from_str(json.dumps(settings))
        # Aliases are not in the model's vocabulary, so their ids and all later ones are different.
        self._id_of = {sealed.token_to_id(name): token_id for name, token_id in added.items()}
        # The unknown token is allowed: text without another reading becomes it, with no effect.
        forbidden = self._alias_of.keys() - {settings["model"].get("unk_token")}
        self._forbidden = {sealed.token_to_id(name): name for name in forbidden}
        # Longest first, as the tokenizer matches them.
        names = sorted(self._alias_of, key=len, reverse=True)
        either = "|".join(map(re.escape, names)) or "(?!)"
        patterns = [_whole_word(name) if name in words else re.escape(name) for name in names]
        self._whole = re.compile("|".join(patterns) or "(?!)")
        self._first_character = re.compile(f"(?=(?:{either})).", re.DOTALL)  # overlapping ones too
        self._beginnings = {name[:size] for name in names for size in range(1, len(name))}
        self._longest = max(map(len, names), default=1)
        self._guarded = re.compile(f"{self._guard}([0-9a-f]{{6}})")

    def guard(self, value: Any) -> Any:
        """Copy the messages, with strings in which no special token is complete or begins."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, Mapping):
            # Templates look keys up by name, and a name is no special token. Other keys are the
            # client's text.
            return {self._guard_key(str(key)): self.guard(item) for key, item in value.items()}
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Iterable) and not isinstance(value, bytes):
            return [self.guard(item) for item in value]
        return self._guard_text(str(value))  # as a template would show it

    def seal(self, rendered: str) -> tuple[str, str | None]:
        """Return the prompt's text and its form for `encode`; None: the tokenizer will do."""
        text = self._guarded.sub(_unguarded, rendered)
        if text == rendered and not self._has_variants:
            return text, None
        return text, self._guarded.sub(_unguarded, self.seal_own(rendered))

    def seal_own(self, rendered: str) -> str:
        """Return a text's form for `encode` whose special tokens are all the template's."""
        return self._whole.sub(lambda match: self._alias_of[match[0]], rendered)

    def encode(self, sealed: str) -> list[int]:
        """Return the token ids of a sealed prompt.

        Raises ValueError if the vocabulary has no other reading of a special token's text, as in
        some Unigram models.
        """
        ids = self._sealed_tokenizer.encode(sealed, add_special_tokens=False).ids
        for token_id in self._forbidden.keys() & ids:
            name = self._forbidden[token_id]
            raise ValueError(f"the base model cannot read {name!r} as text: leave it out")
        return [self._id_of.get(token_id, token_id) for token_id in ids]

    def _guard_key(self, key: str) -> str:
        return key if key.isidentifier() else self._guard_text(key)

    def _guard_text(self, text: str) -> str:
        starts = {match.start() for match in self._first_character.finditer(text)}
        # A template may join strings, such as a content's parts, to a special token.
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                starts.add(at)
        pieces, end = [], 0
        for at in sorted(starts):
            pieces += [text[end:at], f"{self._guard}{ord(text[at]):06x}"]
            end = at + 1
        return "".join([*pieces, text[end:]])


def _whole_word(name: str) -> str:
    return rf"(?<!\w){re.escape(name)}(?!\w)"


def _unguarded(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))
