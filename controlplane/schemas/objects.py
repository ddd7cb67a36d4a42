"""Keywords on objects."""

from __future__ import annotations

import itertools
import math
from typing import Any

from contract.patterns import ANYTHING, BadPattern, literal, read_pattern
from controlplane.schemas.findings import Status
from controlplane.schemas.pointers import join
from controlplane.schemas.subschemas import IN_PLACE
from controlplane.schemas.walker import Handler, Node, Walk

#: The most combinations of present properties that are listed as choices.
MAX_CHOICES = 32


def properties(walk: Walk, node: Node, value: dict[str, Any]) -> None:
    walk.note(node, "properties", Status.ENFORCED)
    at = join(node.at, "properties")
    node.out["properties"] = {name: walk.node(part, join(at, name)) for name, part in value.items()}


def pattern_properties(walk: Walk, node: Node, value: dict[str, Any]) -> None:
    """Keep all patterns or none: without one, `additionalProperties` would mean something else."""
    at = join(node.at, "patternProperties")
    try:
        patterns = {name: read_pattern(name) for name in value}
    except BadPattern as error:
        walk.note(node, "patternProperties", Status.UNSUPPORTED, f"a pattern {error}")
        return
    if any(pattern.whole is None for pattern in patterns.values()):
        walk.check_later(node, "patternProperties", "anchors inside a pattern are only checked")
        return
    walk.note(node, "patternProperties", Status.ENFORCED)
    node.out["patternProperties"] = {
        f"^{patterns[name].whole}$": walk.node(part, join(at, name)) for name, part in value.items()
    }


def additional_properties(walk: Walk, node: Node, value: Any) -> None:
    keyword = "additionalProperties"
    patterns = node.schema.get("patternProperties", {})
    if not all(_is_followed(pattern) for pattern in patterns):
        walk.check_later(node, keyword, "as `patternProperties` beside it")
        return
    walk.note(node, keyword, Status.ENFORCED)
    node.out[keyword] = walk.node(value, join(node.at, keyword))


def _is_followed(pattern: str) -> bool:
    try:
        return read_pattern(pattern).whole is not None
    except BadPattern:
        return False


def unevaluated_properties(walk: Walk, node: Node, value: Any) -> None:
    keyword = "unevaluatedProperties"
    if IN_PLACE & node.schema.keys() or (node.known is not node.schema and _inherits(node)):
        walk.check_later(node, keyword, "the schemas beside it evaluate properties too")
    elif "additionalProperties" in node.schema:
        walk.absorb(node, keyword, "`additionalProperties` covers every property")
    elif not all(_is_followed(pattern) for pattern in node.schema.get("patternProperties", {})):
        walk.check_later(node, keyword, "as `patternProperties` beside it")
    else:
        walk.note(node, keyword, Status.ENFORCED, "as `additionalProperties`")
        node.out["additionalProperties"] = walk.node(value, join(node.at, keyword))


def _inherits(node: Node) -> bool:
    return node.known.keys() != node.schema.keys()


def required(walk: Walk, node: Node, value: list[str]) -> None:
    walk.keep(node, "required", value)


def min_properties(walk: Walk, node: Node, value: float) -> None:
    least, needed = int(value), len(set(node.schema.get("required", ())))
    if least <= needed:
        walk.note(node, "minProperties", Status.ENFORCED, "`required` names as many")
        return
    optional = _optional(node)
    count = math.comb(len(optional), least - needed) if optional else 0
    if not 0 < count <= MAX_CHOICES or not walk.may_split(count):
        walk.check_later(node, "minProperties", "the decoder does not count properties here")
        return
    ways = itertools.combinations(optional or (), least - needed)
    node.also.append({"anyOf": [{"required": list(way)} for way in ways]})
    walk.note(node, "minProperties", Status.ENFORCED, "as a choice of required properties")


def max_properties(walk: Walk, node: Node, value: float) -> None:
    most, optional = int(value), _optional(node)
    if optional is None:
        _keep_max(walk, node, most)
        return
    needed = len(set(node.schema.get("required", ())))
    too_many = needed + len(optional) - most
    if too_many <= 0:
        walk.note(node, "maxProperties", Status.ENFORCED, "there are no more")
        return
    count = math.comb(len(optional), too_many) if too_many <= len(optional) else 0
    if not 0 < count <= MAX_CHOICES or not walk.may_split(count):
        walk.check_later(node, "maxProperties", "the decoder does not count properties here")
        return
    ways = itertools.combinations(optional, too_many)
    node.also.append({"anyOf": [{"properties": dict.fromkeys(way, False)} for way in ways]})
    walk.note(node, "maxProperties", Status.ENFORCED, "as a choice of properties left out")


def _keep_max(walk: Walk, node: Node, most: int) -> None:
    """Keep it if all of `properties` are required: only then the decoder counts."""
    names = node.known.get("properties", {}).keys()
    is_alone = not IN_PLACE & node.known.keys() and node.known.keys() == node.schema.keys()
    if names <= set(node.schema.get("required", ())) and is_alone:
        walk.keep(node, "maxProperties", most)
    else:
        walk.check_later(node, "maxProperties", "the decoder does not count properties here")


def _optional(node: Node) -> list[str] | None:
    """Return the optional properties; None if any property is allowed."""
    if node.schema.get("additionalProperties") is not False:
        return None
    if node.schema.get("patternProperties") or node.types != ["object"]:
        return None
    needed = set(node.schema.get("required", ()))
    parts = node.schema.get("properties", {})
    return [name for name, part in parts.items() if name not in needed and part is not False]


def dependent_required(walk: Walk, node: Node, value: dict[str, list[str]]) -> None:
    if not walk.may_split(2 ** len(value)):
        walk.check_later(node, "dependentRequired", "there are too many of its kind")
        return
    for name, needed in value.items():
        node.also.append({"anyOf": [{"properties": {name: False}}, {"required": [name, *needed]}]})
    walk.note(node, "dependentRequired", Status.ENFORCED, "as a choice with and without")


def dependent_schemas(walk: Walk, node: Node, value: dict[str, Any]) -> None:
    if not walk.may_split(2 ** len(value)):
        walk.check_later(node, "dependentSchemas", "there are too many of its kind")
        return
    at = join(node.at, "dependentSchemas")
    walk.note(node, "dependentSchemas", Status.ENFORCED, "as a choice with and without")
    for name, part in value.items():
        then = walk.node(part, join(at, name), node.known)
        node.also.append(
            {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]}
        )


def property_names(walk: Walk, node: Node, value: Any) -> None:
    """Turn it into patterns of names, if no other keyword applies to unlisted names."""
    keyword = "propertyNames"
    pattern = _names_pattern(walk.resolve(value))
    if value is True or value == {}:
        walk.note(node, keyword, Status.ENFORCED, "it forbids nothing here")
    elif pattern is None or not IN_PLACE.isdisjoint(node.known):
        walk.check_later(node, keyword, "enforced for patterns, lengths and enums of names")
    else:
        walk.absorb(node, keyword, "as `patternProperties`")
        node.also.append({"patternProperties": {pattern: True}, "additionalProperties": False})


def _names_pattern(names: Any) -> str | None:
    if not isinstance(names, dict):
        return None
    rules = names.keys() - {"type", "description", "title"}
    if names.get("type", "string") != "string":
        return None
    if rules == {"pattern"} and _is_followed(names["pattern"]):
        return f"^{read_pattern(names['pattern']).whole}$"
    if rules == {"enum"} and all(isinstance(name, str) for name in names["enum"]):
        return f"^(?:{'|'.join(literal(name) for name in names['enum'])})$"
    if rules and rules <= {"minLength", "maxLength"}:
        least, most = int(names.get("minLength", 0)), names.get("maxLength")
        one = ANYTHING.removesuffix("*")
        if max(least, int(most or 0)) <= 1000:
            return f"^{one}{{{least},{'' if most is None else int(most)}}}$"
    return None


HANDLERS: dict[str, Handler] = {
    "properties": properties,
    "patternProperties": pattern_properties,
    "additionalProperties": additional_properties,
    "unevaluatedProperties": unevaluated_properties,
    "required": required,
    "minProperties": min_properties,
    "maxProperties": max_properties,
    "dependentRequired": dependent_required,
    "dependentSchemas": dependent_schemas,
    "propertyNames": property_names,
}
