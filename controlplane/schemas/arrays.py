"""Keywords on arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

from controlplane.schemas.findings import Status
from controlplane.schemas.pointers import join
from controlplane.schemas.subschemas import IN_PLACE
from controlplane.schemas.walker import Handler, Node, Walk

#: Largest number of arrays of different values that are listed as an enum.
MAX_SPELLED_OUT = 400


def items(walk: Walk, node: Node, value: Any) -> None:
    walk.note(node, "items", Status.ENFORCED)
    node.out["items"] = walk.node(value, join(node.at, "items"))


def prefix_items(walk: Walk, node: Node, value: list[Any]) -> None:
    walk.note(node, "prefixItems", Status.ENFORCED)
    at = join(node.at, "prefixItems")
    node.out["prefixItems"] = [walk.node(part, join(at, i)) for i, part in enumerate(value)]


def unique_items(walk: Walk, node: Node, value: bool) -> None:
    if not value or node.known.get("maxItems", 2) <= 1:
        walk.note(node, "uniqueItems", Status.ENFORCED, "it forbids nothing here")
        return
    arrays = _different(walk, node)
    if arrays is None:
        walk.check_later(node, "uniqueItems", "the decoder does not compare items")
        return
    node.also.append({"enum": arrays})
    walk.note(node, "uniqueItems", Status.ENFORCED, "every array of different items is listed")


def _different(walk: Walk, node: Node) -> list[list[Any]] | None:
    """Return every array of different items from an `enum`; None if there are too many."""
    item = walk.resolve(node.schema.get("items"))
    values = item.get("enum") if isinstance(item, dict) else None
    if not isinstance(values, list) or node.types != ["array"] or "prefixItems" in node.schema:
        return None
    least = int(node.schema.get("minItems", 0))
    most = min(int(node.schema.get("maxItems", len(values))), len(values))
    count = sum(math.perm(len(values), size) for size in range(least, most + 1))
    if not 0 < count <= MAX_SPELLED_OUT:
        return None
    sizes = range(least, most + 1)
    return [list(array) for size in sizes for array in itertools.permutations(values, size)]


def unevaluated_items(walk: Walk, node: Node, value: Any) -> None:
    if IN_PLACE & node.schema.keys() or "contains" in node.schema:
        walk.check_later(node, "unevaluatedItems", "the schemas beside it evaluate items too")
    elif "items" in node.schema:
        walk.absorb(node, "unevaluatedItems", "`items` covers every item")
    else:
        walk.note(node, "unevaluatedItems", Status.ENFORCED, "as `items`")
        node.out["items"] = walk.node(value, join(node.at, "unevaluatedItems"))


def checked(keyword: str, reason: str) -> Handler:
    def handle(walk: Walk, node: Node, value: Any) -> None:
        walk.check_later(node, keyword, reason)

    return handle


_COUNTS = "the decoder does not count the items that fit"

HANDLERS: dict[str, Handler] = {
    "items": items,
    "prefixItems": prefix_items,
    "uniqueItems": unique_items,
    "unevaluatedItems": unevaluated_items,
    "contains": checked("contains", _COUNTS),
    "minContains": checked("minContains", _COUNTS),
    "maxContains": checked("maxContains", _COUNTS),
}
