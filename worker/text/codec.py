"""Text to token ids and back: chat template, tokenizer, text that arrives token by token.

Reads the model folder's tokenizer.json and chat template itself; `transformers`, which imports
torch, is not needed. A test holds both against it.
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

from contract.protocol import context_length
from worker.text.control_tokens import ControlTokens
from worker.text.token_pieces import TokenPieces

#: What an incomplete UTF-8 sequence decodes to.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: A character has four bytes: so many at the end may still become one.
MAX_GARBLED = 3


class PromptError(Exception):
    """The prompt cannot be rendered; the message is for the person who sent it."""


class Chat(NamedTuple):
    """A rendered chat: as it reads, and as `TextCodec.encode_chat` must read it."""

    text: str
    sealed: str | None  # where the text alone does not tell who wrote a special token


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
        #: Whether the chat template shows tools itself.
        self.takes_tools = bool(source) and "tools" in jinja2.meta.find_undeclared_variables(
            environment.parse(source or "")
        )
        self.context_length = context_length(_read_json(model_dir / "config.json")) or 2048
        self.vocab_size = self._tokenizer.get_vocab_size()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        decoder = _read_json(model_dir / "tokenizer.json").get("decoder")
        #: What single tokens stand for.
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
        """The prompt of a chat, up to where the assistant speaks. Raises PromptError.

        tools              OpenAI's tool objects, for a template that `takes_tools`
        options            what else the client would have the template know
        generation_prompt  False: without the words that make the assistant speak

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
        """Token ids, of which only the template's are control tokens. Raises PromptError."""
        if chat.sealed is None:
            return self.encode(chat.text, add_special_tokens=False)
        try:
            return self._control.encode(chat.sealed)
        except ValueError as error:
            raise PromptError(f"The messages cannot be encoded: {error}.") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text whose author may write control tokens as well."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode` with special tokens, and the characters [from, to] that each token stands for.

        Together they are the whole text: a token begins where the one before it ends, or where the
        character does of which both have bytes.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=True)
        spans: list[tuple[int, int]] = []
        end = 0
        for first, last in encoded.offsets:
            start = min(first, end) if first < last else end
            end = max(end, last)
            spans.append((start, end))
        return encoded.ids, spans

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls the tokens."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens among it."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def min_num_tokens(self, text: str) -> int:
        """A lower bound for the length of `encode(text)`, without the work of it."""
        return len(text) // self._longest_token

    def max_num_chars(self, num_tokens: int) -> int:
        """An upper bound for the characters that so many tokens stand for."""
        return num_tokens * self._longest_token

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token is one that `decode` leaves out."""
        return token_id in self._special_ids


class Detokenizer:
    """Text of a growing list of token ids; together its pieces are `decode` of them all.

    continues  the text goes on another's: a space that it begins with is kept

    A token's text depends on its neighbours (byte sequences, leading spaces), so each piece is
    the difference between two decodings that share a context of a few tokens before it.
    """

    __slots__ = ("_codec", "_context", "_ids", "_shown")

    def __init__(self, codec: TextCodec, *, continues: bool = False) -> None:
        anchor = codec.pieces.anchor if continues else None
        self._codec = codec
        # The context, then tokens not wholly shown.
        self._ids: list[int] = [] if anchor is None else [anchor]
        self._context = len(self._ids)  # how many of `_ids` are context
        self._shown = codec.decode(self._ids)  # how much of the text of `_ids` is out

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; a character still missing bytes waits."""
        if not token_ids:
            return ""
        self._ids += token_ids
        text = self._codec.decode(self._ids)
        if not text.startswith(self._shown):
            # A byte-fallback decoder gives up on a whole run of bytes at its first invalid one,
            # which also takes back what the context read as. Start afresh behind the context.
            self._ids, self._context, self._shown = self._ids[self._context :], 0, ""
            text = self._codec.decode(self._ids)
        garbled = len(text) - len(text.rstrip(REPLACEMENT))
        if garbled == 0:
            return self._advance(text)
        piece = text[len(self._shown) : len(text) - min(garbled, MAX_GARBLED)]
        self._shown += piece
        return piece

    def finish(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._advance(self._codec.decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        """Show all of `text`; the tokens it came from become the context of the next."""
        piece = text[len(self._shown) :]
        if piece:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._codec.decode(self._ids)
        return piece


class StopStrings:
    """Cuts text at the stop string that is complete first; holds back what may begin one.

    Of several that are complete at once, the longest counts: how the text arrives in pieces
    makes no difference.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string that was met (and cut off)."""
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
        """What was held back and is now known to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as the template refers to them."""
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
    """{% generation %} marks the assistant's words for training; here it is only passed through."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ["name:endgeneration"], drop_needle=True
        )
        return body


def _template_environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers renders chat templates in."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
