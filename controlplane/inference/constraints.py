"""Constraints of an answer as OpenAI, LoRAX, TGI, vLLM and SGLang write them; a request may have
one.

    response_format                        OpenAI's; json_object with schema or value as LoRAX, TGI
    structured_outputs, guided_*           vLLM's, of today and of old
    regex, ebnf, json_schema               SGLang's
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from controlplane.errors import InvalidRequest
from controlplane.inference.bodies import Body
from controlplane.inference.ebnf import BadGrammar, to_lark
from controlplane.inference.json_schema import checked_pattern, checked_schema
from controlplane.infra import finite_json

#: Length of a schema that comes as text; once read it has the bounds of all schemas.
MAX_SCHEMA_CHARS = 128 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form that an answer must have: exactly one of the last four is set.

    field  the body's field that it came from
    """

    field: str
    is_strict: bool = False
    schema: dict[str, Any] | None = None
    pattern: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None


def _unset(value: Any) -> Any:
    if value in (None, False, ""):
        return None
    raise PydanticCustomError("unsupported", "is not supported")


def _read_schema(value: Any) -> Any:
    """Read a schema that is given as JSON text."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_CHARS:
        raise PydanticCustomError("invalid_schema", f"has more than {MAX_SCHEMA_CHARS} characters")
    try:
        schema = pydantic_core.from_json(value, allow_inf_nan=False)
        finite_json.check_value(schema)
    except (ValueError, InvalidRequest) as error:
        raise PydanticCustomError("invalid_schema", "is text, but not of valid JSON") from error
    return schema


def _checked_grammar(grammar: str) -> str:
    try:
        to_lark(grammar)
    except BadGrammar as error:
        raise PydanticCustomError("invalid_schema", "{problem}", {"problem": str(error)}) from error
    return grammar


Schema = Annotated[dict[str, Any], AfterValidator(checked_schema)]
SchemaOrText = Annotated[Schema, BeforeValidator(_read_schema)]
Pattern = Annotated[str, AfterValidator(checked_pattern)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=1000)
]
GrammarText = Annotated[str, AfterValidator(_checked_grammar)]
Unset = Annotated[Any, AfterValidator(_unset)]


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str | None, Field(max_length=512)] = None
    # A dict, checked: the field's name would hide a method of BaseModel.
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


#: The type of a `value` of TGI's -> the field that it has here.
_TGIS = {
    "json_object": "schema",
    "json": "schema",
    "regex": "pattern",
    "json_schema": "json_schema",
}


class ResponseFormat(Body):
    """OpenAI's types and two more: `regex`, which the whole answer matches, and `choice`, a list of
    all possible answers. LoRAX gives `json_object` a `schema`; TGI, which also calls it `json`,
    gives each a `value`."""

    type: Literal["text", "json_object", "json", "json_schema", "regex", "choice"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[SchemaOrText | None, Field(alias="schema")] = None
    value: Any = None  # becomes one of the others
    pattern: Pattern | None = None
    choices: Choices | None = None

    @model_validator(mode="before")
    @classmethod
    def _value_is_of_its_type(cls, value: Any) -> Any:
        """Move TGI's `value` to the field that it has here."""
        if not isinstance(value, dict) or value.get("value") is None:
            return value
        kind, given = value.get("type"), value["value"]
        name = _TGIS.get(kind) if isinstance(kind, str) else None
        if name is None or value.get(name) is not None:
            raise ValueError("value: must be a schema (json, json_schema) or a pattern (regex)")
        if name == "json_schema" and isinstance(given, dict):
            given = {"name": "answer", **given}
        return {name: given} | {k: v for k, v in value.items() if k not in ("value", name)}

    @model_validator(mode="after")
    def _what_its_type_needs_is_there(self) -> ResponseFormat:
        for kind, field in (
            ("json_schema", "json_schema"),
            ("regex", "pattern"),
            ("choice", "choices"),
        ):
            if (self.type == kind) != (getattr(self, field) is not None):
                raise ValueError(f"{field}: required with type {kind}, and only with it")
        if self.schema_ is not None and self.type not in ("json_object", "json"):
            raise ValueError("schema: allowed only with type json_object; see json_schema")
        return self

    def constraint(self) -> Constraint | None:
        if self.json_schema is not None:
            return Constraint(
                field="response_format.json_schema.schema",
                is_strict=bool(self.json_schema.strict),
                schema=self.json_schema.schema_,
            )
        if self.type in ("json_object", "json"):
            return Constraint(field="response_format.schema", schema=self.schema_ or _ANY_OBJECT)
        if self.type == "text":
            return None
        return Constraint(field="response_format", pattern=self.pattern, choices=self.choices)


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class StructuredOutputs(Body):
    """vLLM's: exactly one of the first five."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Unset = None
    whitespace_pattern: Unset = None
    disable_any_whitespace: Unset = None
    disable_additional_properties: Unset = None
    # Options for vLLM's choice of a backend; here there is only one.
    disable_fallback: bool | None = None
    backend: Annotated[str | None, Field(max_length=100)] = None

    def constraints(self) -> list[Constraint]:
        found = _constraints(
            {
                "structured_outputs.json": self.json_,
                "structured_outputs.regex": self.regex,
                "structured_outputs.choice": self.choice,
                "structured_outputs.grammar": self.grammar,
                "structured_outputs.json_object": _ANY_OBJECT if self.json_object else None,
            }
        )
        return found


def _constraints(given: dict[str, Any]) -> list[Constraint]:
    """Return a constraint for each field that is set."""
    kinds = {"json": "schema", "regex": "pattern", "choice": "choices", "grammar": "grammar"}
    return [
        Constraint(field=field, **{kinds[_KIND_OF.get(field.split(".")[-1], "json")]: value})
        for field, value in given.items()
        if value is not None
    ]


_KIND_OF = {
    **dict.fromkeys(("regex", "guided_regex"), "regex"),
    **dict.fromkeys(("choice", "guided_choice"), "choice"),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), "grammar"),
}


class Constrained(Body):
    """The fields of a body that constrain the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: Unset = None
    guided_decoding_backend: Annotated[str | None, Field(max_length=100)] = None
    regex: Pattern | None = None
    ebnf: GrammarText | None = None
    json_schema: SchemaOrText | None = None

    @model_validator(mode="after")
    def _one_constraint(self) -> Constrained:
        found = self._constraints()
        if len(found) > 1:
            field, other = found[1].field, found[0].field
            raise ValueError(f"{field}: cannot be combined with {other}: give one of them")
        if self.structured_outputs is not None and not self.structured_outputs.constraints():
            raise ValueError("structured_outputs: set json, regex, choice, grammar or json_object")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """Return what the answer must match, if anything."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        form, vllm = self.response_format, self.structured_outputs
        first = form.constraint() if form is not None else None
        found = [] if first is None else [first]
        found += vllm.constraints() if vllm is not None else []
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        given = {name: getattr(self, name) for name in (*names, "regex", "ebnf", "json_schema")}
        return found + _constraints(given)
