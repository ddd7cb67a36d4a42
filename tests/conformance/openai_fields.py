"""Walk the types of OpenAI's own client: every field that it can send, with values for it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

Json = dict[str, Any]
Put = Callable[[Any], Json]
_SIMPLE: dict[Any, Any] = {str: "x", int: 1, float: 1.0, bool: True, object: "x"}


class Sent(NamedTuple):
    """A body with one field set.

    path  as `messages[assistant].content[refusal].refusal`: the brackets have the role or type of
          an object; the last field ends with `=value` if its type lists its values
    """

    path: str
    body: Json


class Fitting(NamedTuple):
    """What a field needs to be accepted, by its path.

    beside  other fields of the same object
    inside  fields of the object that it is
    before  items that come before it in its list, by its type or role
    values  the value itself
    """

    beside: Mapping[str, Json] = {}
    inside: Mapping[str, Json] = {}
    before: Mapping[str, list[Json]] = {}
    values: Mapping[str, Any] = {}


_NOTHING = Fitting()


class Walker:
    """Walks a type of the client.

    accepts  whether a body is accepted; an object that is refused with its required fields alone is
             not walked
    """

    def __init__(self, accepts: Callable[[Json], bool], fitting: Fitting = _NOTHING) -> None:
        self._accepts = accepts
        self._fitting = fitting

    def walk(self, kind: Any) -> Iterator[Sent]:
        """Yield a body for each field of the type, and of the objects in it, and each value."""
        return self._fields(kind, "", {**_least(kind), **self._fitting.inside.get("", {})}, dict)

    def _fields(self, kind: Any, path: str, least: Json, put: Put) -> Iterator[Sent]:
        for name, hint in get_type_hints(kind).items():
            if name in ("type", "role") and len(get_args(hint)) == 1 and path:
                continue  # it is in the path
            where = f"{path}.{name}".lstrip(".")
            fields = {**least, **self._fitting.beside.get(where, {})}

            def put_here(value: Any, name: str = name, fields: Json = fields) -> Json:
                return put({**fields, name: value})

            yield from self._values(hint, where, put_here)

    def _values(self, hint: Any, path: str, put: Put) -> Iterator[Sent]:
        members = list(_members(hint))
        if path in self._fitting.values:
            yield Sent(path, put(self._fitting.values[path]))
            return
        for member in members:
            if member is type(None):
                yield Sent(f"{path}=null", put(None))
            elif get_origin(member) is Literal:
                for value in get_args(member) if str not in members else ():
                    yield Sent(f"{path}={value}", put(value))
            elif member is bool:
                yield Sent(f"{path}=false", put(False))
                yield Sent(f"{path}=true", put(True))
            elif is_typeddict(member):
                yield from self._object(member, path, put)
            elif _is_list(member):
                yield from self._values(get_args(member)[0], path, self._listed(put))
            else:
                yield Sent(path, put(_example(member)))

    def _listed(self, put: Put) -> Put:
        def put_item(value: Any) -> Json:
            kind = value.get("role") or value.get("type") if isinstance(value, dict) else None
            return put([*self._fitting.before.get(str(kind), ()), value])

        return put_item

    def _object(self, kind: Any, path: str, put: Put) -> Iterator[Sent]:
        where = path + _tag(kind)
        least = {**_least(kind), **self._fitting.inside.get(where, {})}
        whole = Sent(where, put(least))
        yield whole
        if self._accepts(whole.body):
            yield from self._fields(kind, where, least, put)


def _members(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type."""
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _is_list(hint: Any) -> bool:
    origin = get_origin(hint)
    is_many = isinstance(origin, type) and issubclass(origin, Iterable)
    return is_many and not issubclass(origin, Mapping)


def _tag(kind: Any) -> str:
    """Return `[user]` for a type whose role, or `[text]` for one whose type, is that alone."""
    hints = get_type_hints(kind)
    for name in ("type", "role"):
        values = get_args(next(_members(hints.get(name))))
        if len(values) == 1:
            return f"[{values[0]}]"
    return ""


def _least(kind: Any) -> Json:
    """Return an object with its required fields alone."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: _example(get_args(hint)[0])
        for name, hint in hints.items()
        if get_origin(hint) is Required
    }


def _example(hint: Any) -> Any:
    member = next(each for each in _members(hint) if each is not type(None))
    if get_origin(member) is Literal:
        return get_args(member)[0]
    if is_typeddict(member):
        return _least(member)
    if _is_list(member):
        return [_example(get_args(member)[0])]
    return _SIMPLE.get(member, {})
