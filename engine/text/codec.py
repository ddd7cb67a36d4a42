"""TextCodec: text to token ids and back, with the chat template, for one base model.

It needs the tokenizer's own library and not `transformers`, which imports torch. A test compares
the results of both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from contract.adapters.base_shape import context_length
from engine.text.answer_text import Detokenizer
from engine.text.call_formats import CallFormat, call_format
from engine.text.chat_template import Chat, ChatTemplate, PromptError
from engine.text.control_tokens import ControlTokens
from engine.text.harmony import Harmony
from engine.text.thoughts import ThoughtMarks, Thoughts
from engine.text.token_pieces import TokenPieces
from engine.text.tokenizer_files import read_json, read_special_tokens


class TextCodec:
    """A model folder's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, model_dir: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config = read_json(model_dir / "config.json")
        self._set_up(tokenizer, _template_source(model_dir), read_special_tokens(model_dir))
        self.context_length = context_length(config) or 2048
        self._config: dict[str, Any] = config.get("text_config") or config

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str, special_tokens: dict[str, str]) -> Self:
        """Return the codec of a tokenizer without a folder.

        tokenizer       belongs to the codec from now on
        template        source of the chat template
        special_tokens  eos_token, bos_token and so on, by name
        """
        codec = cls.__new__(cls)
        codec._set_up(tokenizer, template, special_tokens)
        codec._config = {}
        return codec

    def _set_up(
        self, tokenizer: Tokenizer, template: str | None, special_tokens: dict[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(self._tokenizer)
        self._special_tokens = special_tokens
        self._beginning = Beginning(self._tokenizer)
        self._template = ChatTemplate(template, self._control, special_tokens) if template else None
        self.vocab_size = self._tokenizer.get_vocab_size()
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        #: Text and bytes of single tokens.
        self.pieces = TokenPieces(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        #: Names of added tokens that are part of a text, as `<tool_call>` of some models.
        self.added_text = frozenset(each.content for each in added.values() if not each.special)
        ids = {each.content: token_id for token_id, each in added.items()}
        #: Added tokens by name.
        self.added_ids = ids
        #: The way in which the model tells its thoughts from its answer; None: it does not.
        self.thoughts: Thoughts | None = ThoughtMarks.of(ids, self.pieces)
        self.thoughts = self.thoughts or Harmony.of(ids, self.pieces)

    def with_template(self, source: str) -> Self:
        """Return a codec with this chat template: this one, if it has it."""
        if self._template is not None and self._template.source == source:
            return self
        other = copy.copy(self)
        other._template = ChatTemplate(source, self._control, self._special_tokens)
        return other

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template renders tools itself."""
        return self._template is not None and self._template.takes_tools

    @property
    def call_format(self) -> CallFormat | None:
        """Return the form in which the model writes calls of tools; None: ours."""
        if self._template is None or not self.takes_tools:
            return None
        return call_format(self._config, self._template.source)

    @property
    def takes_thoughts(self) -> bool:
        """Return whether the chat template renders `reasoning_content`."""
        return self._template is not None and self._template.takes_thoughts

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: dict[str, Any] | None = None,
        generation_prompt: bool = True,
    ) -> Chat:
        """Render the prompt of a chat, up to where the assistant's answer begins.

        tools              OpenAI's tool objects, for a template that `takes_tools`
        options            the client's other variables for the template
        generation_prompt  False: without the template's words that begin the assistant's turn

        Raises PromptError.
        """
        if self._template is None:
            raise PromptError("The base model has no chat template; use /v1/completions.")
        return self._template.render(
            messages, tools, options=options, generation_prompt=generation_prompt
        )

    def encode_chat(self, chat: Chat) -> list[int]:
        """Encode a chat; only the template may write control tokens. Raises PromptError."""
        if chat.sealed is None:
            return self.encode(chat.text, add_special_tokens=False)
        try:
            return self._control.encode(chat.sealed)
        except ValueError as error:
            raise PromptError(f"The messages cannot be encoded: {error}.") from error

    def rest(self, chat: Chat, beginning: Chat) -> Chat:
        """Return what follows in a chat whose text begins as the other one's."""
        if chat.sealed is None and beginning.sealed is None:
            return Chat(chat.text[len(beginning.text) :], None)
        sealed, first = (
            each.sealed or self._control.seal_own(each.text) for each in (chat, beginning)
        )
        return Chat(chat.text[len(beginning.text) :], sealed[len(first) :])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text whose author may also write control tokens.

        add_special_tokens  also those that the tokenizer puts around a text, as BOS, unless the
                            text begins with them itself
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids[self._beginning.num_doubled(ids) :] if add_special_tokens else ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode with special tokens; return also the characters [from, to) of each token.

        The spans cover the whole text: a token begins where the one before it ends. If two tokens
        share the bytes of a character, the second begins with that character.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=True)
        num_doubled = self._beginning.num_doubled(encoded.ids)
        spans: list[tuple[int, int]] = []
        end = 0
        for first, last in encoded.offsets[num_doubled:]:
            start = min(first, end) if first < last else end
            end = max(end, last)
            spans.append((start, end))
        return encoded.ids[num_doubled:], spans

    def encode_next(self, token_ids: Sequence[int], before: str, text: str) -> list[int]:
        """Encode the text that follows another one, whose tokens are these."""
        whole = self.encode(before + text, add_special_tokens=True)
        if whole[: len(token_ids)] == list(token_ids):
            return whole[len(token_ids) :]
        return self.encode(text, add_special_tokens=False)

    @property
    def end_id(self) -> int | None:
        """The token with which the model ends a text."""
        token_id: int | None = self._tokenizer.token_to_id(
            self._special_tokens.get("eos_token", "")
        )
        return token_id

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens' names in the vocabulary."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Decode to text, with special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound for the length of `encode(text)`, without encoding."""
        return len(text) // self._longest_token

    def max_num_chars(self, num_tokens: int) -> int:
        """Return an upper bound for the number of characters that `num_tokens` tokens decode to."""
        return num_tokens * self._longest_token

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode to text, without special tokens."""
        detokenizer = Detokenizer(self.pieces)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()

    def is_special(self, token_id: int) -> bool:
        """Return whether `decode` leaves the token out."""
        return token_id in self.pieces.special_ids


class Beginning:
    """The tokens that a tokenizer puts before a text, as BOS, without looking at the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoded = tokenizer.encode("a", add_special_tokens=True)
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        self._ids = [token_id for token_id, _ in itertools.takewhile(lambda pair: pair[1], pairs)]

    def num_doubled(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens to leave out, as the text has them at its beginning, too."""
        size = len(self._ids)
        is_doubled = list(token_ids[: 2 * size]) == self._ids * 2
        return size if is_doubled else 0


def _template_source(model_dir: Path) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text() or None
    source = read_json(model_dir / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((item["template"] for item in source if item["name"] == "default"), None)
    return source or None
