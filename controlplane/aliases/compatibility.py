"""Compare two published schemas: does the new one break callers of the old one?

A caller is taken to ignore properties that it does not know. So new properties break nobody. At
each place of the old schema these do:

- `type` allows another type, or is gone; `enum` or `const` allows another value, or is gone;
- a property is gone, or is no longer required;
- a bound (`minimum`, `maxLength`, `minItems` …) is wider, or is gone;
- `anyOf` has another branch;
- any other keyword than a description, a `default` and the like is changed or gone. These are not
  understood here, and so `$ref` must stay the same; what it refers to is compared as a place.

So a change that this lets pass gives callers answers that the old schema allows, but for new
properties. Some harmless changes are refused; `force` is for them. Removing the schema breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from contract.messages.protocol import canonical_json
from controlplane.schemas.pointers import join

_LEAST = frozenset(
    {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}
)
_MOST = frozenset(
    {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"}
)
_ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly",
     "title", "writeOnly"}
)  # fmt: skip
#: Boolean, they say whether there may be other properties, which callers ignore.
_OF_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties"})
#: New keywords that take something from what an old one requires.
_WEAKENS = {"prefixItems": "items", "minContains": "contains"}
_PLACES = frozenset({"properties", "$defs", "definitions"})


def breaking_changes(old: dict[str, Any], new: dict[str, Any] | None) -> list[str]:
    """Return what breaks callers, each with its place; [] if nothing does.

    new  None: there is no schema any more
    """
    if new is None:
        return ["there is no schema any more"]
    return list(_compare(old, new, ""))


def _compare(old: Any, new: Any, at: str) -> Iterator[str]:
    if canonical_json(old) == canonical_json(new) or old is True or new is False:
        return
    if not (isinstance(old, dict) and isinstance(new, dict)):
        yield f"{at or '/'} is another schema"
        return
    yield from _added(old, new, at)
    for keyword, value in old.items():
        is_of_others = keyword in _OF_OTHERS and isinstance(value, bool)
        if keyword in _ANNOTATIONS or is_of_others:
            continue
        place = join(at, keyword)
        if keyword not in new:
            if keyword not in ("$defs", "definitions"):
                yield f"{place} is gone"
            continue
        yield from _HANDLERS.get(keyword, _same)(value, new[keyword], place)


def _added(old: dict[str, Any], new: dict[str, Any], at: str) -> Iterator[str]:
    for keyword, weaker in _WEAKENS.items():
        if keyword in new and keyword not in old and weaker in old:
            yield f"{join(at, keyword)} is new"
    if any(isinstance(old.get(keyword), dict) for keyword in _OF_OTHERS):
        for name in new.get("properties", {}).keys() - old.get("properties", {}).keys():
            yield f"{join(at, 'properties', name)} was one of the other properties"


def _same(old: Any, new: Any, at: str) -> Iterator[str]:
    if canonical_json(old) != canonical_json(new):
        yield f"{at} is changed"


def _bound(is_narrower: Callable[[Any, Any], bool]) -> Callable[[Any, Any, str], Iterator[str]]:
    def compare(old: Any, new: Any, at: str) -> Iterator[str]:
        if not is_narrower(old, new):
            yield f"{at} is wider"

    return compare


def _type(old: Any, new: Any, at: str) -> Iterator[str]:
    allowed = {old} if isinstance(old, str) else set(old)
    if "number" in allowed:
        allowed.add("integer")
    added = ({new} if isinstance(new, str) else set(new)) - allowed
    if added:
        yield f"{at} allows {', '.join(sorted(added))}"


def _values(old: Any, new: Any, at: str) -> Iterator[str]:
    allowed = {canonical_json(value) for value in old}
    if any(canonical_json(value) not in allowed for value in new):
        yield f"{at} allows other values"


def _branches(old: Any, new: Any, at: str) -> Iterator[str]:
    allowed = {canonical_json(branch) for branch in old}
    if any(canonical_json(branch) not in allowed for branch in new):
        yield f"{at} allows other values"


def _required(old: Any, new: Any, at: str) -> Iterator[str]:
    for name in old:
        if name not in new:
            yield f"{join(at, name)} is no longer required"


def _places(old: Any, new: Any, at: str) -> Iterator[str]:
    for name, schema in old.items():
        if name in new:
            yield from _compare(schema, new[name], join(at, name))
        elif at.rpartition("/")[2] == "properties":
            yield f"{join(at, name)} is gone"


_HANDLERS: dict[str, Callable[[Any, Any, str], Iterator[str]]] = {
    **dict.fromkeys(_LEAST, _bound(lambda old, new: new >= old)),
    **dict.fromkeys(_MOST, _bound(lambda old, new: new <= old)),
    **dict.fromkeys(_PLACES, _places),
    "type": _type,
    "enum": _values,
    "anyOf": _branches,
    "required": _required,
    **dict.fromkeys(("items", *_OF_OTHERS), _compare),
}
