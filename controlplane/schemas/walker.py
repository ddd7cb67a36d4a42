"""Walk over a schema: report how each keyword is treated, and write the schema for the decoder.

That schema allows the same answers, or more: a keyword that the decoder does not support is left
out, and where that would forbid an answer (for instance inside `not`) the whole part is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from controlplane.schemas.findings import BadSchema, Finding, Status
from controlplane.schemas.name_patterns import NamePatterns
from controlplane.schemas.pointers import References, join
from controlplane.schemas.subschemas import LISTS, OBJECTS, ONE, property_names

#: Most rewrites into alternatives; the decoder multiplies those of one object.
MAX_SPLITS = 6


@dataclass(slots=True)
class Node:
    """One schema on the walk.

    known  its keywords, and those of the schemas in whose `allOf` it is
    out    the decoder's schema in its place; `also` applies as well
    """

    schema: dict[str, Any]
    at: str
    known: dict[str, Any]
    out: dict[str, Any] = field(default_factory=dict)
    also: list[Any] = field(default_factory=list)

    @property
    def types(self) -> list[str] | None:
        """Return the types that the schema itself allows; None: any."""
        types = self.known.get("type")
        return [types] if isinstance(types, str) else types

    def whole(self) -> dict[str, Any]:
        """Return the decoder's schema, with independent parts already merged: this saves the
        decoder time."""
        parts: list[Any] = []
        for part in self.also:
            is_free = isinstance(part, dict) and not _depend(part.keys(), self.out.keys())
            # In their order, which is the order of the answer's properties.
            if is_free and not parts and "$ref" not in part and "$ref" not in self.out:
                self.out.update(part)
            else:
                parts.append(part)
        if parts:
            self.out["allOf"] = [*self.out.get("allOf", ()), *parts]
        return self.out


def _depend(some: Set[str], others: Set[str]) -> bool:
    """Return whether the keywords of two schemas would mean something else in one schema."""
    return bool(
        some & others
        or ("additionalProperties" in some and _NAMES & others)
        or ("additionalProperties" in others and _NAMES & some)
    )


_NAMES = frozenset({"properties", "patternProperties"})

#: Handles a keyword, given the walk, the node and the keyword's value.
Handler = Callable[["Walk", Node, Any], None]


class Walk:
    """A walk over one schema. `findings` is complete when `run` has returned.

    name_patterns     compares the patterns of property names
    follows_patterns  whether the decoder gets them
    """

    def __init__(
        self,
        schema: dict[str, Any],
        handlers: dict[str, Handler],
        *,
        follows_patterns: bool = True,
    ) -> None:
        self.references = References(schema)
        self.findings: dict[str, Finding] = {}
        self.name_patterns = NamePatterns(property_names(schema))
        self.follows_patterns = follows_patterns
        self._schema = schema
        self._handlers = handlers
        self._instead: tuple[Status, str] | None = None
        self._names: dict[str, str] = {}  # pointer of a reference's target -> name in $defs
        self._todo: list[str] = []
        self._splits_left = MAX_SPLITS

    def run(self) -> dict[str, Any]:
        """Return the schema for the decoder."""
        out = self.node(self._schema, "")
        definitions = {}
        while self._todo:
            pointer = self._todo.pop()
            definitions[self._names[pointer]] = self.node(self.references.target(pointer), pointer)
        if definitions:
            out = (out if isinstance(out, dict) else {"allOf": [out]}) | {"$defs": definitions}
        return out if isinstance(out, dict) else {"allOf": [out]}

    def node(self, schema: Any, at: str, known: dict[str, Any] | None = None) -> Any:
        """Rewrite one schema; `known`: other keywords that apply to the same value."""
        if not isinstance(schema, dict):
            return schema
        node = Node(schema, at, (known or {}) | schema)
        for keyword, value in schema.items():
            handler = self._handlers.get(keyword)
            if handler is not None:
                handler(self, node, value)
            elif keyword.startswith("x-"):
                self.note(node, keyword, Status.ANNOTATION)
            else:
                self.note(node, keyword, Status.UNSUPPORTED, "there is no such keyword")
        return node.whole()

    def note(self, node: Node, keyword: str, status: Status, reason: str = "") -> None:
        """Record a keyword's status. Inside a part that is only checked, all keywords are."""
        if self._instead is not None and status in (Status.ENFORCED, Status.CHECKED):
            status, reason = self._instead
        path = join(node.at, keyword)
        self.findings.setdefault(path, Finding(path, status, reason))

    def keep(self, node: Node, keyword: str, value: Any) -> None:
        """Pass a keyword to the decoder, as `value`."""
        node.out[keyword] = value
        self.note(node, keyword, Status.ENFORCED)

    def check_later(self, node: Node, keyword: str, reason: str) -> None:
        """Leave a keyword and everything inside it to the check of the finished answer."""
        self.note(node, keyword, Status.CHECKED, reason)
        with self._inside(Status.CHECKED, f"inside `{keyword}`, which is only checked"):
            self._walk_inside(node, keyword)

    def absorb(self, node: Node, keyword: str, reason: str) -> None:
        """Record that a keyword and everything inside it are enforced in another form."""
        self.note(node, keyword, Status.ENFORCED, reason)
        with self._inside(Status.ENFORCED, f"as a part of `{keyword}`"):
            self._walk_inside(node, keyword)

    def may_split(self, ways: int = 2) -> bool:
        """Return whether another choice with this number of ways is allowed, and count it."""
        cost = max(1, (ways - 1).bit_length())
        if cost > self._splits_left or self._instead is not None:
            return False
        self._splits_left -= cost
        return True

    def reference(self, node: Node, reference: str) -> dict[str, str]:
        """Return the reference in the rewritten schema, which will contain its target."""
        pointer = self.references.pointer(reference, join(node.at, "$ref"))
        if self._instead is not None:
            return {}
        if pointer not in self._names:
            self._names[pointer] = f"d{len(self._names)}"
            self._todo.append(pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def resolve(self, schema: Any) -> Any:
        """Return the schema, or its target when it is only a reference."""
        for _ in range(10):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or any(key in schema for key in _CONSTRAINING):
                return schema
            try:
                schema = self.references.target(self.references.pointer(reference, ""))
            except BadSchema:
                return {}
        return {}

    @contextlib.contextmanager
    def _inside(self, status: Status, reason: str) -> Iterator[None]:
        before = self._instead
        if before is None or before[0] is Status.ENFORCED:
            self._instead = (status, reason)
        try:
            yield
        finally:
            self._instead = before

    def _walk_inside(self, node: Node, keyword: str) -> None:
        """Note the keywords of the schemas inside a keyword."""
        value, at = node.schema[keyword], join(node.at, keyword)
        if keyword in ONE:
            self.node(value, at)
        elif keyword in LISTS:
            for i, part in enumerate(value):
                self.node(part, join(at, i))
        elif keyword in OBJECTS:
            for name, part in value.items():
                self.node(part, join(at, name))


_CONSTRAINING = frozenset({"allOf", "anyOf", "enum", "const", "not", "oneOf", "properties", "type"})


def annotation(keyword: str) -> Handler:
    """Handle a keyword that requires nothing."""

    def handle(walk: Walk, node: Node, value: Any) -> None:
        walk.note(node, keyword, Status.ANNOTATION)

    return handle
