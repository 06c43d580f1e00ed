"""A calculator as the tool of a policy: sums, differences and products of integers, without Python's ``eval``."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

MOST_CHARACTERS: Final = 64
"""The most characters of an expression. It bounds the size of the value, too."""
OPERATIONS: Final[Mapping[type, Callable[..., int]]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.UAdd: operator.pos,
        ast.USub: operator.neg,
    }
)
"""The operations that the calculator knows."""


def calculate(expression: str) -> int:
    """Return the value of an expression of integers with ``+``, ``-``, ``*`` and parentheses.

    Args:
        expression: the expression.

    Returns:
        The value.

    Raises:
        ValueError: if the text is too long or not such an expression.

    >>> calculate("12*34 + 5"), calculate("-(2 - 5)")
    (413, 3)
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS} characters")
    if not re.fullmatch(r"[0-9+\-*() ]*", expression):
        raise ValueError("only integers and + - * ( )")
    try:
        return _value_of(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("not an expression") from None


def _value_of(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(op=op) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value_of(node.left), _value_of(node.right))
        case ast.UnaryOp(op=op) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value_of(node.operand))
    raise ValueError("not an expression")
