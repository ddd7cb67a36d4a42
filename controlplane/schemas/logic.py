"""References, combinations and conditions."""

from __future__ import annotations

from typing import Any

from contract.schemas.patterns import other_than
from controlplane.schemas.disjoint import Disjointness
from controlplane.schemas.findings import Status
from controlplane.schemas.pointers import join
from controlplane.schemas.same import is_same, values_of
from controlplane.schemas.walker import Handler, Node, Walk, annotation

_TYPES = ("null", "boolean", "object", "array", "number", "string")


def ref(walk: Walk, node: Node, value: str) -> None:
    walk.note(node, "$ref", Status.ENFORCED)
    rewritten = walk.reference(node, value)
    # Beside other keywords the decoder would have to merge a schema that may contain itself.
    if len(node.out) == 0 and not node.also:
        node.out.update(rewritten)
    elif rewritten:
        node.also.append(rewritten)


def all_of(walk: Walk, node: Node, value: list[Any]) -> None:
    walk.note(node, "allOf", Status.ENFORCED)
    at = join(node.at, "allOf")
    known = {key: item for key, item in node.known.items() if key != "allOf"}
    node.also += [walk.node(part, join(at, i), known) for i, part in enumerate(value)]


def any_of(walk: Walk, node: Node, value: list[Any]) -> None:
    walk.note(node, "anyOf", Status.ENFORCED)
    node.also.append({"anyOf": _branches(walk, node, "anyOf", value)})


def one_of(walk: Walk, node: Node, value: list[Any]) -> None:
    """Treat `oneOf` as a choice, if no value can match two of the schemas."""
    overlap = Disjointness(walk).overlap(value, node.known)
    if overlap is not None and (ways := _one_property_of(node, value)) is not None:
        walk.absorb(node, "oneOf", "as a choice of the one property")
        node.also.append({"anyOf": ways})
        return
    if overlap is None:
        walk.note(node, "oneOf", Status.ENFORCED, "as a choice: no value matches two of them")
    else:
        reason = f"a value may match both {overlap[0]} and {overlap[1]}; one is enforced"
        walk.note(node, "oneOf", Status.CHECKED, reason)
    node.also.append({"anyOf": _branches(walk, node, "oneOf", value)})


def _one_property_of(node: Node, value: list[Any]) -> list[Any] | None:
    """Return the ways to have exactly one of some properties; None if `value` is not that."""
    names = []
    for part in value:
        if not isinstance(part, dict) or part.keys() != {"required"} or len(part["required"]) != 1:
            return None
        names += part["required"]
    if node.types != ["object"] or len(set(names)) != len(names):
        return None
    return [
        {"required": [name], "properties": {other: False for other in names if other != name}}
        for name in names
    ]


def _branches(walk: Walk, node: Node, keyword: str, value: list[Any]) -> list[Any]:
    at = join(node.at, keyword)
    return [walk.node(part, join(at, i)) for i, part in enumerate(value)]


def not_(walk: Walk, node: Node, value: Any) -> None:
    forbidden = walk.resolve(value)
    rewritten = _opposite(node, forbidden)
    if rewritten is None:
        walk.check_later(node, "not", "the decoder cannot negate this schema")
        return
    walk.absorb(node, "not", "as what is left")
    if rewritten is not True:
        node.also.append(rewritten)


def _opposite(node: Node, forbidden: Any) -> Any:
    """Return a schema of the node's values that are not `forbidden`; None if there is none."""
    if isinstance(forbidden, bool):
        return not forbidden
    rules = forbidden.keys() - {"$comment", "description", "title"}
    if not rules:
        return False
    if rules == {"type"}:
        return _not_of_type(node, forbidden["type"])
    if rules <= {"enum", "const", "type"} and (values := values_of(forbidden)) is not None:
        return _none_of(node, values)
    if rules == {"required"} and node.types == ["object"] and len(forbidden["required"]) == 1:
        return {"properties": {forbidden["required"][0]: False}}
    return None


def _not_of_type(node: Node, types: str | list[str]) -> Any:
    forbidden = {types} if isinstance(types, str) else set(types)
    left = [name for name in node.types or _TYPES if name not in forbidden]
    if "number" in forbidden:
        left = [name for name in left if name != "integer"]
    elif "integer" in forbidden and "number" in left:
        return None
    return {"type": left} if left else False


def _none_of(node: Node, values: list[Any]) -> Any:
    own = values_of(node.known)
    if own is not None:
        left = [value for value in own if not any(is_same(value, other) for other in values)]
        return {"enum": left} if left else False
    if node.types == ["string"]:
        texts = [value for value in values if isinstance(value, str)]
        return {"pattern": f"^{other_than(texts)}$"} if texts else True
    if node.types == ["integer"] and len(values) == 1 and type(values[0]) is int:
        return {"anyOf": [{"maximum": values[0] - 1}, {"minimum": values[0] + 1}]}
    return None


def if_(walk: Walk, node: Node, value: Any) -> None:
    """Make a choice, if one property decides and all its possible values are known."""
    ways = _ways(node, walk.resolve(value))
    if "then" not in node.schema and "else" not in node.schema:
        walk.absorb(node, "if", "it requires nothing without `then` or `else`")
        return
    if ways is None or not walk.may_split():
        reason = "enforced where one property's `const` or `enum` decides"
        for keyword in ("if", "then", "else"):
            if keyword in node.schema:
                walk.check_later(node, keyword, reason)
        return
    choice = []
    for keyword, way in zip(("then", "else"), ways, strict=True):
        part = node.schema.get(keyword, True)
        rewritten = walk.node(part, join(node.at, keyword), node.known)
        if keyword in node.schema:
            walk.note(node, keyword, Status.ENFORCED)
        choice.append({"allOf": [way, rewritten]})
    walk.absorb(node, "if", "as a choice of two ways")
    node.also.append({"anyOf": choice})


def _ways(node: Node, condition: Any) -> tuple[Any, Any] | None:
    """Return the schemas of values that match the condition and that do not, or None."""
    if isinstance(condition, bool):
        return condition, not condition
    if node.types != ["object"] or condition.keys() - {"properties", "required", "type"}:
        return None
    tested = condition.get("properties", {})
    needed = condition.get("required", [])
    if condition.get("type", "object") != "object" or len(tested) != 1:
        return None
    ((name, part),) = tested.items()
    values, base = values_of(part), node.known.get("properties", {}).get(name)
    if values is None or not isinstance(base, dict) or set(needed) - {name}:
        return None
    other = Node(base, "", base)
    rest = _none_of(other, values)
    if rest is None or part.keys() - {"const", "enum", "type", "title", "description"}:
        return None
    yes: dict[str, Any] = {"properties": {name: {"enum": values}}}
    no: dict[str, Any] = {"properties": {name: rest}}
    (yes if needed else no)["required"] = [name]
    return yes, no


def with_if(keyword: str) -> Handler:
    def handle(walk: Walk, node: Node, value: Any) -> None:
        if "if" not in node.schema:
            walk.note(node, keyword, Status.ANNOTATION, "it requires nothing without `if`")

    return handle


def unsupported(keyword: str, reason: str) -> Handler:
    def handle(walk: Walk, node: Node, value: Any) -> None:
        walk.note(node, keyword, Status.UNSUPPORTED, reason)

    return handle


def identifier(walk: Walk, node: Node, value: str) -> None:
    """Accept the name of the whole schema; the name of a part would change its references."""
    if node.at == "":
        walk.note(node, "$id", Status.ANNOTATION)
    else:
        walk.note(node, "$id", Status.UNSUPPORTED, "only the whole schema may have a name")


_OLD = "JSON Schema 2020-12 has no such keyword; write "

HANDLERS: dict[str, Handler] = {
    "$ref": ref,
    "$id": identifier,
    # A definition is walked where a reference names it.
    "$defs": annotation("$defs"),
    "definitions": annotation("definitions"),
    "allOf": all_of,
    "anyOf": any_of,
    "oneOf": one_of,
    "not": not_,
    "if": if_,
    "then": with_if("then"),
    "else": with_if("else"),
    "$vocabulary": annotation("$vocabulary"),
    "$dynamicAnchor": annotation("$dynamicAnchor"),
    "$dynamicRef": unsupported("$dynamicRef", "write `$ref`"),
    "$recursiveRef": unsupported("$recursiveRef", _OLD + "`$ref`"),
    "additionalItems": unsupported("additionalItems", _OLD + "`items` beside `prefixItems`"),
    "dependencies": unsupported("dependencies", _OLD + "`dependentRequired` or `dependentSchemas`"),
    "divisibleBy": unsupported("divisibleBy", _OLD + "`multipleOf`"),
    "nullable": unsupported("nullable", _OLD + "`null` among the types"),
}
