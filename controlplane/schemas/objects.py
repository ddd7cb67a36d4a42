"""Keywords on objects."""

from __future__ import annotations

import itertools
import math
from typing import Any

from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import literal, read_pattern
from controlplane.schemas.findings import BadSchema, Status
from controlplane.schemas.name_patterns import MAX_PATTERNS
from controlplane.schemas.pointers import join
from controlplane.schemas.subschemas import IN_PLACE
from controlplane.schemas.walker import Handler, Node, Walk

#: Largest number of combinations of present properties that are listed as choices.
MAX_CHOICES = 32


def properties(walk: Walk, node: Node, value: dict[str, Any]) -> None:
    walk.note(node, "properties", Status.ENFORCED)
    at = join(node.at, "properties")
    own = {name: walk.node(part, join(at, name)) for name, part in value.items()}
    node.out["properties"] = _both(own, node.out.get("properties", {}))


def pattern_properties(walk: Walk, node: Node, value: dict[str, Any]) -> None:
    """Keep all patterns or none: without one, `additionalProperties` would mean something else.

    A pattern that other properties may use up is listed as properties: behind the last of them the
    decoder would allow a comma, and then find that no name is left.
    """
    at = join(node.at, "patternProperties")
    reason, status = _hindrance(walk, value, at)
    if status is Status.UNSUPPORTED:
        walk.note(node, "patternProperties", status, reason)
        return
    if status is Status.CHECKED:
        walk.check_later(node, "patternProperties", reason)
        return
    walk.note(node, "patternProperties", Status.ENFORCED)
    for pattern, part in value.items():
        rewritten = walk.node(part, join(at, pattern))
        names = walk.name_patterns.used_up(pattern)
        if names is not None:
            listed = dict.fromkeys(names, rewritten)
            node.out["properties"] = _both(node.out.get("properties", {}), listed)
        else:
            patterns = node.out.get("patternProperties", {})
            whole = f"^{read_pattern(pattern).whole}$"
            node.out["patternProperties"] = _both(patterns, {whole: rewritten})


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return schemas by name that require both mappings' schemas."""
    return one | {
        name: {"allOf": [one[name], part]} if name in one and one[name] != part else part
        for name, part in other.items()
    }


def _hindrance(walk: Walk, patterns: dict[str, Any], at: str) -> tuple[str, Status]:
    """Return why the decoder cannot follow patterns of names, and how they are treated then.

    Raises BadSchema for an invalid pattern.
    """
    try:
        wholes = [read_pattern(pattern).whole for pattern in patterns]
    except BadPattern as error:
        if error.is_invalid:
            raise BadSchema(f"has a pattern that {error}", at) from error
        return f"a pattern {error}", Status.UNSUPPORTED
    if None in wholes:
        return "anchors inside a pattern are only checked", Status.CHECKED
    if patterns and not walk.follows_patterns:
        return "a name may match patterns of two schemas of the object", Status.CHECKED
    if walk.name_patterns.are_too_many(list(patterns)):
        return f"enforced for {MAX_PATTERNS} patterns of names", Status.CHECKED
    pair = walk.name_patterns.overlapping(list(patterns))
    if pair is not None:
        return f"a name may match both {pair[0]} and {pair[1]}", Status.CHECKED
    return "", Status.ENFORCED


def additional_properties(walk: Walk, node: Node, value: Any) -> None:
    keyword = "additionalProperties"
    if not _are_followed(walk, node):
        walk.check_later(node, keyword, "as `patternProperties` beside it")
        return
    walk.note(node, keyword, Status.ENFORCED)
    node.out[keyword] = walk.node(value, join(node.at, keyword))


def _are_followed(walk: Walk, node: Node) -> bool:
    """Return whether the decoder follows the patterns of a node's property names."""
    at = join(node.at, "patternProperties")
    patterns = node.schema.get("patternProperties", {})
    return _hindrance(walk, patterns, at)[1] is Status.ENFORCED


def unevaluated_properties(walk: Walk, node: Node, value: Any) -> None:
    keyword = "unevaluatedProperties"
    if IN_PLACE & node.schema.keys() or (node.known is not node.schema and _inherits(node)):
        walk.check_later(node, keyword, "the schemas beside it evaluate properties too")
    elif "additionalProperties" in node.schema:
        walk.absorb(node, keyword, "`additionalProperties` covers every property")
    elif not _are_followed(walk, node):
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
    """Keep `maxProperties` if all of `properties` are required: only then the decoder counts."""
    names = node.known.get("properties", {}).keys()
    is_alone = not IN_PLACE & node.known.keys() and node.known.keys() == node.schema.keys()
    is_alone = is_alone and not {"patternProperties", "propertyNames"} & node.known.keys()
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
    """Turn `propertyNames` into patterns, if no other keyword applies to unlisted names."""
    keyword = "propertyNames"
    allowed = _allowed_names(walk, walk.resolve(value)) if walk.follows_patterns else None
    if value is True or value == {}:
        walk.note(node, keyword, Status.ENFORCED, "it forbids nothing here")
    elif allowed is None or not (IN_PLACE | {"patternProperties"}).isdisjoint(node.known):
        walk.check_later(node, keyword, "enforced for patterns, lengths and enums of names")
    else:
        walk.absorb(node, keyword, "as `patternProperties`")
        node.also.append(allowed | {"additionalProperties": False})


def _allowed_names(walk: Walk, names: Any) -> dict[str, Any] | None:
    """Return the keyword for the properties of these names; None: they cannot be followed."""
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return None
    rules = names.keys() - {"type", "description", "title"}
    if rules == {"enum"}:
        texts = [name for name in names["enum"] if isinstance(name, str)]
        if walk.name_patterns.lists(texts):
            return {"properties": dict.fromkeys(texts, True)}
        return {"patternProperties": {f"^(?:{'|'.join(map(literal, texts))})$": True}}
    if rules == {"pattern"}:
        pattern = names["pattern"]
    elif rules and rules <= {"minLength", "maxLength"}:
        least, most = int(names.get("minLength", 0)), names.get("maxLength")
        pattern = f"^[^]{{{least},{'' if most is None else int(most)}}}$"
    else:
        return None
    try:
        whole = read_pattern(pattern).whole
    except BadPattern:
        return None
    used_up = None if whole is None else walk.name_patterns.used_up(pattern)
    if used_up is not None:
        return {"properties": dict.fromkeys(used_up, True)}
    return None if whole is None else {"patternProperties": {f"^{whole}$": True}}


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
