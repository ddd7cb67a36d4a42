"""ChatTemplate: renders chats with a base model's own template, as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.control_tokens import ControlTokens


class PromptError(Exception):
    """The prompt cannot be rendered; the message is for the person who sent it."""


class Chat(NamedTuple):
    """A rendered chat: its text, and its form for `TextCodec.encode_chat`."""

    text: str
    sealed: str | None  # see ControlTokens.seal; None: `text` can be encoded as it is


class ChatTemplate:
    """A chat template. Safe to use from several threads.

    takes_tools     whether it renders tools itself
    takes_thoughts  whether it renders thoughts that stand beside the content
    """

    def __init__(self, source: str, control: ControlTokens, special_tokens: dict[str, str]) -> None:
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(
            environment.parse(source)
        )
        self._thought = next(
            (n for n in ("reasoning_content", "thinking") if f".{n}" in source), ""
        )
        self.takes_thoughts = bool(self._thought) or "reasoning_content" in source
        self._control, self._special_tokens = control, special_tokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        *,
        options: dict[str, Any] | None,
        generation_prompt: bool,
    ) -> Chat:
        """Render a chat; see `TextCodec.render`. Raises PromptError.

        Source: transformers.utils.chat_template_utils.render_jinja_template.
        """
        try:
            rendered = self._template.render(
                self._control.guard(options or {}),
                messages=[self._control.guard(self._named(message)) for message in messages],
                tools=[self._control.guard(dict(tool)) for tool in tools] or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise PromptError(f"The chat template refuses these messages: {error}") from error
        return Chat(*self._control.seal(rendered))

    def _named(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in which the thought has gpt-oss's name where the template has that."""
        named = dict(message)
        if self._thought == "thinking" and "reasoning_content" in named:
            named["thinking"] = named.pop("reasoning_content")
        return named


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %}, which marks the assistant's words for training, without effect."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ["name:endgeneration"], drop_needle=True
        )
        return body


def _environment() -> ImmutableSandboxedEnvironment:
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
