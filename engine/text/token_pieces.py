"""TokenPieces: the text and bytes of single tokens.

The bytes of an answer's tokens, joined, are the answer's bytes: a tokenizer's decoder treats each
token alike wherever it stands, except at a text's edges. In a SentencePiece vocabulary a word's
token includes the space before it, which the decoder drops at the beginning; in others, the space
behind it, which the decoder drops at the end. So a token is decoded between other tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

#: Tokens to remember, the latest; each takes some hundred bytes.
_NUM_KEPT = 16_384
#: A byte in a vocabulary with byte fallback.
_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")
_GARBLED = "\N{REPLACEMENT CHARACTER}"


class TokenPiece(NamedTuple):
    """A token's text, and its bytes, which may be only a part of a character.

    A special token's text is its name. It has no bytes: it is not part of the answer's text.
    """

    text: str
    bytes: bytes


class TokenPieces:
    """Reads tokens of one vocabulary. Safe to use from several threads.

    special_ids  the tokens that a text leaves out
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._special_names = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = frozenset(self._special_names)
        self._tokenizer = tokenizer
        self._anchor = self._find_anchor()
        self._before, self._after = "", ""
        if self._anchor is not None:
            self._before = self._decode(self._anchor)
            self._after = self._decode(self._anchor, self._anchor)[len(self._before) :]
        self._read_once = functools.lru_cache(_NUM_KEPT)(self._read)

    def of(self, token_id: int, *, is_first: bool) -> TokenPiece:
        """Return a token's piece; is_first: the text begins with this token."""
        return self._read_once(token_id, is_first)

    def special_among(self, names: Sequence[str]) -> dict[int, str]:
        """Return the special tokens that have one of these names, by id."""
        if not names:
            return {}
        return {i: name for i, name in self._special_names.items() if name in names}

    def is_silent(self, token_id: int) -> bool:
        """Return whether the token adds nothing to a text, so that the text begins behind it."""
        return not self.of(token_id, is_first=False).bytes

    def _read(self, token_id: int, is_first: bool) -> TokenPiece:
        if token_id in self.special_ids:
            return TokenPiece(self._text(token_id, True), b"")
        text = self._text(token_id, is_first)
        # What the bytes of a name are is up to the decoder, which shows at least whole characters.
        for raw in _bytes_of(self._tokenizer.id_to_token(token_id) or ""):
            if raw.decode(errors="replace") == text:
                return TokenPiece(text, raw)
        return TokenPiece(text, text.encode())

    def _text(self, token_id: int, is_first: bool) -> str:
        if self._anchor is None:
            return self._decode(token_id)
        before = "" if is_first else self._before
        ids = (token_id, self._anchor) if is_first else (self._anchor, token_id, self._anchor)
        text = self._decode(*ids)
        size = len(text) - len(self._after)
        if size >= len(before) and text.startswith(before) and text.endswith(self._after):
            return text[len(before) : size]
        return self._decode(token_id)

    def _decode(self, *token_ids: int) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _find_anchor(self) -> int | None:
        """Return a token to put around others: a letter, or else any with a text; None: no token.

        A letter is no part of a character, whatever bytes stand beside it.
        """
        letters = map(self._tokenizer.token_to_id, string.ascii_letters)
        for token_id in itertools.chain(letters, range(self._tokenizer.get_vocab_size())):
            if token_id is None or token_id in self.special_ids:
                continue
            text = self._decode(token_id)
            twice = self._decode(token_id, token_id)
            is_plain = text.strip() != "" and _GARBLED not in text
            if is_plain and twice.startswith(text) and twice != text:
                return token_id
        return None


def _bytes_of(name: str) -> list[bytes]:
    """Return the bytes that a token of this name may be: by byte-level BPE, or as a lone byte."""
    found = []
    if all(character in _BYTE_OF for character in name):
        found.append(bytes(_BYTE_OF[character] for character in name))
    if match := _BYTE_NAME.fullmatch(name):
        found.append(bytes([int(match[1], 16)]))
    return found


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE vocabularies. Source: GPT-2's bytes_to_unicode."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
