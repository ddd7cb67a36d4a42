"""Tools in chat bodies: their definitions, the choice among them, the calls in messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from contract.messages.tool_calls import read_arguments
from controlplane.inference.bodies import Body, Replayed, unsupported
from controlplane.inference.json_schema import checked_schema

MAX_TOOLS = 128
#: Bytes of all tools of a request together, as JSON.
MAX_TOOLS_BYTES = 256 * 1024
#: Number of objects in all tools together: each may be another schema to check.
MAX_TOOLS_OBJECTS = 4000
MAX_CALLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def only_functions(value: Any) -> Any:
    """Return a tool, a call or a choice. Raises if it is of another type than a function."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(
            "the tools here are functions", f"is of type `{kind[:40]}`, which is not supported"
        )
    return value


def check_choice(value: Any) -> Any:
    """Return a choice of tools. Raises if it is of a type that no tool here has."""
    is_some = isinstance(value, dict) and value.get("type") == "allowed_tools"
    return value if is_some else only_functions(value)


def _named(value: Any) -> Any:
    """Return a choice as OpenAI writes it: TGI's is a function's name alone."""
    if isinstance(value, str) and value not in get_args(ToolMode) and value:
        return {"type": "function", "function": {"name": value}}
    return check_choice(value)


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Check a schema of arguments, which are an object also if the schema has no type."""
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("invalid_schema", "must describe an object, as arguments are one")
    return checked_schema({"type": "object", **schema})


class FunctionDefinition(Body):
    name: FunctionName
    description: Annotated[str | None, Field(max_length=16_384)] = None
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """One function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def rendered(self) -> dict[str, Any]:
        """Return the function for the chat template."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or NO_PARAMETERS
        return {"type": "function", "function": function}


Tool = Annotated[FunctionTool, BeforeValidator(only_functions)]


class FunctionNamed(Body):
    name: FunctionName


class NamedTool(Body):
    """The choice of one function, which must be called."""

    type: Literal["function"]
    function: FunctionNamed


class AllowedToolNames(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedTool, BeforeValidator(only_functions)]],
        Field(min_length=1, max_length=MAX_TOOLS),
    ]


class AllowedTools(Body):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolNames


ToolMode = Literal["none", "auto", "required"]
ToolChoice = ToolMode | NamedTool | AllowedTools
GivenChoice = Annotated[ToolChoice | None, BeforeValidator(_named)]


class CalledFunction(Replayed):
    name: FunctionName
    arguments: str


class ToolCall(Replayed):
    """A call in an assistant's message, as an earlier answer had it."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    type: Literal["function"]
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return the call for the chat template, its arguments as an object if they are one."""
        arguments = read_arguments(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _some(calls: Any) -> Any:
    """Make None of an empty list, which other servers write where there are no calls."""
    return None if calls == [] else calls


ToolCalls = Annotated[
    Annotated[
        list[Annotated[ToolCall, BeforeValidator(only_functions)]], Field(max_length=MAX_CALLS)
    ]
    | None,
    BeforeValidator(_some),
]


def bounded(tools: Any) -> Any:
    """Bound the tools of a body before each schema is checked."""
    if not isinstance(tools, list):
        return tools
    if len(tools) > MAX_TOOLS:
        raise PydanticCustomError("too_long", f"has {len(tools)} tools; {MAX_TOOLS} is the limit")
    try:
        text = json.dumps(tools, separators=(",", ":"))
    except RecursionError as error:
        raise PydanticCustomError("too_long", "is nested too deeply") from error
    if len(text) > MAX_TOOLS_BYTES:
        raise PydanticCustomError("too_long", f"is longer than {MAX_TOOLS_BYTES} bytes together")
    if text.count("{") > MAX_TOOLS_OBJECTS:
        raise PydanticCustomError("too_long", f"has more than {MAX_TOOLS_OBJECTS} objects in it")
    return tools


def check_tools(tools: list[FunctionTool]) -> None:
    """Raise ValueError for two tools of the same name."""
    names = [tool.function.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"tools.{number}.function.name: there are two functions {name}")


def chosen(
    tools: list[FunctionTool], choice: ToolChoice | None
) -> tuple[list[FunctionTool], str | None]:
    """Return the tools that may be called, and the job's `tool_choice`.

    Raises ValueError for a choice that is not among the tools.
    """
    if choice not in (None, "none", "auto") and not tools:
        raise ValueError("tool_choice: allowed only with tools")
    if choice == "none" or not tools:
        return [], None
    if choice is None or isinstance(choice, str):
        return tools, choice or "auto"
    named = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
    by_name = {tool.function.name: tool for tool in tools}
    for each in named:
        if each.function.name not in by_name:
            raise ValueError(
                f"tool_choice: there is no tool {each.function.name}: it is none, auto, required "
                "or one of tools"
            )
    if isinstance(choice, NamedTool):
        return tools, f"={choice.function.name}"
    allowed = {each.function.name for each in named}
    kept = [tool for tool in tools if tool.function.name in allowed]
    return kept, choice.allowed_tools.mode
