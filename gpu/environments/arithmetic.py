"""Arithmetic that a policy writes, computed without running it as code: Python's grammar, and bounded work."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from gpu.environments.resources import ToolError

LENGTH = 200
"""Characters of an expression."""
BITS = 256
"""Of an integer on the way and at the end."""

Number = int | float
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(text: str) -> Number:
    """The value of numbers joined by + - * / // % ** and brackets. Raises `ToolError` for everything else."""
    if len(text) > LENGTH:
        raise ToolError(f"longer than {LENGTH} characters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("too large") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow):
                _check_power(a, b)
            return _bounded(_BINARY[type(op)](a, b))
    raise ToolError("only numbers, + - * / // % ** and brackets")


def _check_power(base: Number, exponent: Number) -> None:
    """Before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * BITS:
        raise OverflowError
    if base < 0 and not float(exponent).is_integer():
        raise ToolError("no root of a negative number")


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value
