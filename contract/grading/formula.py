"""The formula by which a grader of type `multi` joins the scores of others. Pure.

Numbers, the graders' names, + - * / ^, parentheses, and the functions of `_FUNCTIONS`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_CHARS = 1000
_MAX_DEPTH = 40
_MAX_NUMBER = 1e300
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
#: Functions that take two numbers or more; the others take one.
_OF_SEVERAL = ("min", "max")


class Formula:
    """A formula over the scores of graders. Raises ValueError, which says what is wrong with it."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        if len(text) > MAX_CHARS:
            raise ValueError(f"has more than {MAX_CHARS} characters")
        try:
            self._root = ast.parse(text.replace("^", "**").strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError("is not a formula such as 0.5 * format + 0.5 * answer") from None
        self._check(self._root, frozenset(names), _MAX_DEPTH)

    def _check(self, node: ast.AST, names: frozenset[str], depth: int) -> None:
        if not depth:
            raise ValueError("is nested too deeply")
        parts: list[Any]
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                if abs(value) > _MAX_NUMBER:
                    raise ValueError("has a number that is too large")
                return
            case ast.Name(id=name) if name in names:
                return
            case ast.Name(id=name):
                raise ValueError(f"names {name[:60]}, which is none of its graders")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                parts = [left, right]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                parts = [operand]
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
                if len(parts) < 2 if name in _OF_SEVERAL else len(parts) != 1:
                    raise ValueError(f"gives {name} {len(parts)} numbers")
            case _:
                known = ", ".join(_FUNCTIONS)
                raise ValueError(f"may have numbers, graders, + - * / ^ and {known} alone")
        for part in parts:
            self._check(part, names, depth - 1)

    def value(self, scores: Mapping[str, float]) -> float:
        """Return the value for scores. Raises ArithmeticError, ValueError where there is none."""
        found = float(self._value(self._root, scores))
        if not math.isfinite(found):
            raise ValueError("the formula's value is not finite")
        return found

    def _value(self, node: Any, scores: Mapping[str, float]) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                return scores[name]
            case ast.BinOp(left=left, op=op, right=right):
                parts = self._value(left, scores), self._value(right, scores)
                return _OPERATORS[type(op)](*parts)
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATORS[type(op)](self._value(operand, scores))
        return _FUNCTIONS[node.func.id](*(self._value(part, scores) for part in node.args))
