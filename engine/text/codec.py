"""TextCodec: text to token ids and back, with chat template, incremental decoding and stop strings.

It reads the model folder's tokenizer.json and chat template itself, without `transformers`, which
imports torch. A test compares the results of both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from contract.base_shape import context_length
from engine.text.control_tokens import ControlTokens
from engine.text.token_pieces import TokenPieces

#: An incomplete UTF-8 sequence decodes to this.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: A character has at most four bytes, so up to three at the end may still become one.
MAX_GARBLED = 3


class PromptError(Exception):
    """The prompt cannot be rendered; the message is for the person who sent it."""


class Chat(NamedTuple):
    """A rendered chat: its text, and its form for `TextCodec.encode_chat`."""

    text: str
    sealed: str | None  # see ControlTokens.seal; None: `text` can be encoded as it is


class TextCodec:
    """The base model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(self._tokenizer)
        settings = _read_json(model_dir / "tokenizer_config.json")
        self._special_tokens = _special_tokens(settings)
        source = _template_source(model_dir, settings)
        environment = _template_environment()
        self._template = environment.from_string(source) if source else None
        #: Whether the chat template renders tools itself.
        self.takes_tools = bool(source) and "tools" in jinja2.meta.find_undeclared_variables(
            environment.parse(source or "")
        )
        self.context_length = context_length(_read_json(model_dir / "config.json")) or 2048
        self.vocab_size = self._tokenizer.get_vocab_size()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        decoder = _read_json(model_dir / "tokenizer.json").get("decoder")
        #: Text and bytes of single tokens.
        self.pieces = TokenPieces(
            self._tokenizer,
            special_ids=self._special_ids,
            is_byte_level='"ByteLevel"' in json.dumps(decoder),
        )

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

        Source: transformers.utils.chat_template_utils.render_jinja_template.
        """
        if self._template is None:
            raise PromptError("The base model has no chat template; use /v1/completions.")
        try:
            rendered = self._template.render(
                self._control.guard(options or {}),
                messages=[self._control.guard(dict(message)) for message in messages],
                tools=[self._control.guard(dict(tool)) for tool in tools] or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise PromptError(f"The chat template refuses these messages: {error}") from error
        return Chat(*self._control.seal(rendered))

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
        """Encode a text whose author may also write control tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode with special tokens; return also the characters [from, to) of each token.

        The spans cover the whole text: a token begins where the one before it ends. If two tokens
        share the bytes of a character, the second begins with that character.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=True)
        spans: list[tuple[int, int]] = []
        end = 0
        for first, last in encoded.offsets:
            start = min(first, end) if first < last else end
            end = max(end, last)
            spans.append((start, end))
        return encoded.ids, spans

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
        """Return an upper bound for the number of characters that so many tokens decode to."""
        return num_tokens * self._longest_token

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode to text, without special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return token_id in self._special_ids


class Detokenizer:
    """Decodes a growing list of token ids piece by piece; joined, the pieces equal `decode` of all.

    continues  the text continues another text: a space at its beginning is kept

    A token's text depends on its neighbours (byte sequences, leading spaces), so each piece is
    the difference between two decodings that share a context of a few tokens before it.
    """

    __slots__ = ("_codec", "_context", "_ids", "_shown")

    def __init__(self, codec: TextCodec, *, continues: bool = False) -> None:
        anchor = codec.pieces.anchor if continues else None
        self._codec = codec
        # The context, then tokens whose text was not returned completely.
        self._ids: list[int] = [] if anchor is None else [anchor]
        self._context = len(self._ids)  # how many of `_ids` are context
        self._shown = codec.decode(self._ids)  # the part of the text of `_ids` that was returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; an incomplete character is held back."""
        if not token_ids:
            return ""
        self._ids += token_ids
        text = self._codec.decode(self._ids)
        if not text.startswith(self._shown):
            # At an invalid byte, a byte-fallback decoder replaces the whole run of bytes, so that
            # the context's text changes too. Start again after the context.
            self._ids, self._context, self._shown = self._ids[self._context :], 0, ""
            text = self._codec.decode(self._ids)
        garbled = len(text) - len(text.rstrip(REPLACEMENT))
        if garbled == 0:
            return self._advance(text)
        piece = text[len(self._shown) : len(text) - min(garbled, MAX_GARBLED)]
        self._shown += piece
        return piece

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        return self._advance(self._codec.decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        """Return what is new in `text`; its tokens become the context of the next ones."""
        piece = text[len(self._shown) :]
        if piece:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._codec.decode(self._ids)
        return piece


class StopStrings:
    """Cuts text at the first complete stop string; holds back text that may begin one.

    If several are complete at once, the longest counts. The result does not depend on how the text
    is cut into pieces.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show, and the stop string that was found and cut off."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            return text[:start], text[start:end]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Return the text that was held back, as no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and so on, as variables for the template."""
    tokens = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _template_source(model_dir: Path, settings: dict[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    source = file.read_text() if file.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((item["template"] for item in source if item["name"] == "default"), None)
    return source or None


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %}, which marks the assistant's words for training, without effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ["name:endgeneration"], drop_needle=True
        )
        return body


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Make the environment in which transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
