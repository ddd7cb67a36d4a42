"""Which of a rendered chat's special tokens the template wrote, and which a message only quotes.

A tokenizer makes a control token of every special token that it reads, whoever wrote it: a message
that says `<|im_end|>` would end its own turn and could go on as the system. Here each side is told
apart in three steps. `guard` breaks up what reads as a special token in the messages. After
rendering, `seal` gives the template's own, which alone are whole, names that nobody can guess, and
makes the messages whole again. `encode` reads the result with a tokenizer that knows these names
and no others, in one go, so that the text around is tokenized as ever.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from tokenizers import Tokenizer


class ControlTokens:
    """Keeps messages from speaking in control tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Random: no message can hold an alias, and none is ever shown, not even to the template.
        secret = secrets.token_hex(16)
        # Letters and digits, so that a template's `trim` or `tojson` leaves it alone. To know it
        # is no use: it is taken out after the control tokens have been told apart.
        self._guard = f"g{secrets.token_hex(8)}"
        settings = json.loads(tokenizer.to_str())
        self._id_of: dict[str, int] = {}
        self._alias_of: dict[str, str] = {}
        self._has_variants = False
        for number, token in enumerate(settings["added_tokens"]):
            if token["special"] and token["content"]:
                # Matched after normalization, it may be spelled in ways that cannot be listed.
                self._has_variants |= token["normalized"]
                alias = f"{secret}{number:06x}"
                self._alias_of[token["content"]] = alias
                token["content"] = alias
            self._id_of[token["content"]] = token["id"]
        self._sealed_tokenizer = Tokenizer.from_str(json.dumps(settings))
        # What cannot be read otherwise than as the unknown token is that, and controls nothing.
        self._forbidden = self._alias_of.keys() - {settings["model"].get("unk_token")}
        # The longest first, as the tokenizer matches them.
        names = sorted(self._alias_of, key=len, reverse=True)
        either = "|".join(map(re.escape, names)) or "(?!)"
        self._whole = re.compile(either)
        self._first_character = re.compile(f"(?=(?:{either})).", re.DOTALL)  # overlapping ones too
        self._beginnings = {name[:size] for name in names for size in range(1, len(name))}
        self._longest = max(map(len, names), default=1)
        self._guarded = re.compile(f"{self._guard}([0-9a-f]{{6}})")

    def guard(self, value: Any) -> Any:
        """A copy of the messages in whose strings no special token can be found or begin."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, dict):
            # A name that a template may ask for is no special token; others may be a stranger's.
            return {
                key if key.isidentifier() else self._guard_text(key): self.guard(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guard(item) for item in value]
        return value

    def seal(self, rendered: str) -> tuple[str, str | None]:
        """The prompt as it reads, and sealed for `encode`; None where the tokenizer will do."""
        text = self._guarded.sub(_unguarded, rendered)
        if text == rendered and not self._has_variants:
            return text, None
        sealed = self._whole.sub(lambda match: self._alias_of[match[0]], rendered)
        return text, self._guarded.sub(_unguarded, sealed)

    def encode(self, sealed: str) -> list[int]:
        """The token ids of a sealed prompt.

        Raises ValueError where the vocabulary itself, as some Unigram models' does, has no other
        reading of a special token's text.
        """
        encoding = self._sealed_tokenizer.encode(sealed, add_special_tokens=False)
        tokens = encoding.tokens
        for name in self._forbidden.intersection(tokens):
            raise ValueError(f"the base model cannot read {name!r} as text")
        # An alias is not in the model's vocabulary: its id, and those after it, are other ones.
        return [self._id_of.get(*pair) for pair in zip(tokens, encoding.ids, strict=True)]

    def _guard_text(self, text: str) -> str:
        starts = {match.start() for match in self._first_character.finditer(text)}
        # A template may also put one together from several strings, as from a content's parts.
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._beginnings:
                starts.add(at)
        pieces, end = [], 0
        for at in sorted(starts):
            pieces += [text[end:at], f"{self._guard}{ord(text[at]):06x}"]
            end = at + 1
        return "".join([*pieces, text[end:]])


def _unguarded(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))
