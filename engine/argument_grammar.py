"""The grammar of arguments as Gemma 4 and Qwen3.5 write them.

    {city:<|"|>Paris<|"|>,days:3}

    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>

It enforces types, names, their order, and which are required, of what a schema says directly; what
else the schema says is checked when the answer is whole.
"""

from __future__ import annotations

import json
from typing import Any

from engine.text.call_formats import is_text

_INTEGER = "/-?(0|[1-9][0-9]*)/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"
_ANYTHING = "bare_value"
KEY_RULE = "BARE_KEY: /[a-zA-Z_][a-zA-Z0-9_-]*/"
_SIMPLE = {"string": "bare_text", "integer": "bare_integer", "number": "bare_number"}


def common_rules(quote: str) -> list[str]:
    """Return the rules of values that no schema describes.

    quote  the mark around a text, in Lark
    """
    return [
        f"bare_text: {quote} /(?s:.*)/ {quote}",
        f"bare_integer: {_INTEGER}",
        f"bare_number: {_NUMBER}",
        'bare_list: "[" (bare_value ("," bare_value)*)? "]"',
        'bare_object: "{" (BARE_KEY ":" bare_value ("," BARE_KEY ":" bare_value)*)? "}"',
        KEY_RULE,
        'bare_value: bare_text | bare_number | "true" | "false" | "null" | bare_list | bare_object',
    ]


class BareRules:
    """Writes the rules of one schema. `rules`: those that were written."""

    def __init__(self, name: str, quote: str) -> None:
        self.rules: list[str] = []
        self._name, self._quote = name, quote

    def value(self, schema: Any) -> str:
        """Return what matches a value, in Lark."""
        if not isinstance(schema, dict):
            return _ANYTHING
        if "const" in schema or isinstance(schema.get("enum"), list):
            texts = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(map(self._literal, texts))})"
        if isinstance(schema.get("anyOf"), list) and schema["anyOf"]:
            return f"({' | '.join(map(self.value, schema['anyOf']))})"
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return f"({' | '.join(self._typed(kind, schema) for kind in kinds)})"
        return self._typed(kinds, schema)

    def _typed(self, kind: Any, schema: dict[str, Any]) -> str:
        if kind in _SIMPLE:
            return _SIMPLE[kind]
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        if kind == "array":
            item = self._named(self.value(schema.get("items")))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return self.object(schema)
        return "bare_object" if kind == "object" else _ANYTHING

    def object(self, schema: dict[str, Any]) -> str:
        """Return what matches an object: its properties in their order."""
        items = {
            key: f"{json.dumps(f'{key}:')} {self.value(own)}"
            for key, own in schema["properties"].items()
        }
        pairs = self._chain(items, schema, '","')
        return f'"{{" {pairs} "}}"'

    def tagged(self, schema: dict[str, Any], pair: tuple[str, str, str]) -> str:
        """Return what matches an object whose values stand between tags.

        pair  what stands before a key, behind it, and behind its value
        """
        before, behind, end = pair
        text = f"{self._name}_text"
        self.rules.append(f"{text}[suffix={json.dumps(end)}]: /(?s:.*)/")
        if not isinstance(schema.get("properties"), dict):
            return f"({json.dumps(before)} BARE_KEY {json.dumps(behind)} {text})*"
        definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
        items = {}
        for key, own in schema["properties"].items():
            value = text
            if not is_text(own):
                value = self._named(f"%json {json.dumps({**own, **definitions} if own else {})}")
                value = f"{value} {json.dumps(end)}"
            items[key] = f"{json.dumps(f'{before}{key}{behind}')} {value}"
        return self._chain(items, schema, '""')

    def _chain(self, items: dict[str, str], schema: dict[str, Any], separator: str) -> str:
        """Return what matches properties in their order; those that are not required may lack."""
        required = schema.get("required") or ()
        later = {True: '""', False: '""'}  # what follows, by whether a property stands before it
        for key, own in reversed(items.items()):
            item = self._named(own)
            now = {True: f"{separator} {item} {later[True]}", False: f"{item} {later[True]}"}
            if key not in required:
                now = {is_later: f"{now[is_later]} | {later[is_later]}" for is_later in later}
            later = {is_later: self._named(now[is_later]) for is_later in now}
        return later[False]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        return json.dumps(json.dumps(value))

    def _named(self, expression: str) -> str:
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name
