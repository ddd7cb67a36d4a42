"""TokenPieces: the text and bytes of single tokens, for log-probabilities.

In a SentencePiece vocabulary a word's token includes the space before it, which the decoder drops
at the beginning of a text. So a token that is not the first is decoded after other text. The bytes
of an answer's tokens, joined, are the answer's bytes.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Set
from typing import NamedTuple

from tokenizers import Tokenizer

#: Tokens to remember, the latest; each takes some hundred bytes.
_NUM_KEPT = 16_384


class TokenPiece(NamedTuple):
    """A token's text, and its bytes, which may be only a part of a character.

    A special token's text is its name. It has no bytes: it is not part of the answer's text.
    """

    text: str
    bytes: tuple[int, ...]


class TokenPieces:
    """Reads tokens of one vocabulary. Safe to use from several threads.

    anchor  a token whose text is one letter, to put before others; None: there is none
    """

    def __init__(self, tokenizer: Tokenizer, *, special_ids: Set[int], is_byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._is_byte_level = is_byte_level
        self.anchor = _anchor(tokenizer)
        self._read_once = functools.lru_cache(_NUM_KEPT)(self._read)

    def of(self, token_id: int, *, is_first: bool) -> TokenPiece:
        """Return a token's piece; is_first: the text begins with this token."""
        return self._read_once(token_id, is_first)

    def _read(self, token_id: int, is_first: bool) -> TokenPiece:
        if token_id in self._special_ids:
            return TokenPiece(self._text(token_id, True), ())
        text = self._text(token_id, is_first)
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level and all(character in _BYTE_OF for character in token):
            return TokenPiece(text, tuple(_BYTE_OF[character] for character in token))
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        if is_byte and text:  # the decoder may drop a first space in this form too
            return TokenPiece(text, (int(token[3:5], 16),))
        return TokenPiece(text, tuple(text.encode()))

    def _text(self, token_id: int, is_first: bool) -> str:
        if not is_first and self.anchor is not None:
            before = self._decode(self.anchor)
            text = self._decode(self.anchor, token_id)
            if text.startswith(before):
                return text[len(before) :]
        return self._decode(token_id)

    def _decode(self, *token_ids: int) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _anchor(tokenizer: Tokenizer) -> int | None:
    for letter in string.ascii_letters:
        token_id: int | None = tokenizer.token_to_id(letter)
        if token_id is not None and tokenizer.decode([token_id]) == letter:
            return token_id
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE vocabularies. Source: GPT-2's bytes_to_unicode."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
