"""The messages of chat bodies and their parts, which are all text here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from controlplane.inference.bodies import FirstFault, Label, Replayed, refused, unsupported
from controlplane.inference.tools import ToolCalls


class TextPart(Replayed):
    type: Literal["text"]
    text: str


class RefusalPart(Replayed):
    """The refusal that an assistant gave in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def which_part(value: Any) -> str:
    """Return the tag of a part: what is no refusal should be a text."""
    return "a refusal" if _kind(value) == "refusal" else "a text"


def readable(*kinds: str) -> BeforeValidator:
    """Refuse parts of a message, such as images, that are of none of these types."""

    def check(value: Any) -> Any:
        kind = _kind(value)
        if not isinstance(kind, str) or kind in kinds:
            return value
        raise unsupported(
            "the models here read text alone. Send parts of type text",
            f"is a part of type `{kind[:40]}`",
        )

    return BeforeValidator(check)


Refusal = Annotated[RefusalPart, Tag("a refusal")]


def check_refusals(role: str, content: object) -> None:
    """Raise ValueError for a refusal that is not the assistant's."""
    if isinstance(content, list) and role != "assistant":
        for number, part in enumerate(content):
            if isinstance(part, RefusalPart):
                raise ValueError(f"content.{number}: only an assistant's message has a refusal")


ContentPart = Annotated[
    Annotated[Annotated[TextPart, Tag("a text")] | Refusal, Discriminator(which_part)],
    readable("text", "refusal"),
]


def _role(value: Any) -> Any:
    if value == "function":
        raise unsupported("send role tool, with the tool_call_id", "is not supported as `function`")
    return value


class Message(Replayed):
    role: Annotated[
        Literal["developer", "system", "user", "assistant", "tool"], BeforeValidator(_role)
    ]
    content: str | Annotated[list[ContentPart], FirstFault] | None = None
    name: Label = None
    refusal: str | None = None
    audio: Annotated[Any, refused("the models here read text alone")] = None
    tool_calls: ToolCalls = None
    tool_call_id: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    reasoning_content: Any = None
    function_call: Annotated[Any, refused("send tool_calls")] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        says_else = self.role == "assistant" and (self.tool_calls or self.refusal)
        if self.content is None and not says_else:
            raise PydanticCustomError("missing", "content: required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: allowed only in an assistant's message")
        check_refusals(self.role, self.content)
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: required in a tool's message, and allowed only there")
        return self

    def rendered(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates of open models have no developer role; OpenAI's models treat both alike.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if (
            self.role == "assistant"
            and self.reasoning_content
            and isinstance(self.reasoning_content, str)
        ):
            message["reasoning_content"] = self.reasoning_content  # templates keep what they need
        if self.name is not None:
            message["name"] = self.name  # for templates that tell speakers apart
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
