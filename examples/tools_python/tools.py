"""Two tools for a chat model: a calculator, and a converter of lengths.

The schemas in tools.json are printed by
    python3 scripts/cohort_environment.py examples/tools_python/tools.py --schemas
"""
import ast
import operator

from cohort_environment import tool

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.USub: operator.neg}
METRES = {"mm": 0.001, "cm": 0.01, "m": 1, "km": 1000, "inch": 0.0254, "foot": 0.3048, "mile": 1609.344}


def value(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, + - * / and brackets are known")


@tool
def calculate(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: numbers with + - * / and brackets, such as (3 + 4) * 2
    """
    return f"{value(ast.parse(expression, mode='eval').body):g}"


@tool
def convert(length: float, unit: str, to: str) -> str:
    """Converts a length.

    Args:
        length: the number
        unit: its unit, one of mm, cm, m, km, inch, foot, mile
        to: the unit of the result
    """
    return f"{length * METRES[unit] / METRES[to]:g}"
