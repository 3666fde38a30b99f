"""All durations that the client waits are in the table of ``pannier.common.timeouts``."""

import ast
from collections.abc import Iterator
from pathlib import Path

CLIENT = Path(__file__).parents[3] / "client" / "pannier" / "client"
WAITS = {"acquire", "result", "settimeout", "sleep", "wait"}
"""Methods and functions whose positional arguments are seconds, if they are numbers."""


def names_duration(name: str) -> bool:
    return name == "timeout" or name.endswith("_s")


def given(tree: ast.AST) -> Iterator[ast.expr]:
    """What is given for durations: to calls that wait, and as values and defaults of parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in WAITS:
                yield from node.args
            yield from (each.value for each in node.keywords if names_duration(each.arg or ""))
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            positional = positional[len(positional) - len(node.defaults) :]
            pairs: list[tuple[ast.arg, ast.expr | None]] = [
                *zip(positional, node.defaults, strict=True),
                *zip(node.kwonlyargs, node.kw_defaults, strict=True),
            ]
            yield from (value for each, value in pairs if value and names_duration(each.arg))


def has_seconds(value: ast.expr) -> bool:
    """Whether it is a number other than 0, or is computed from one that isn't an integer."""
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float) and value.value != 0
    constants = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
    return any(isinstance(each, float) and each != 0 for each in constants)


def test_no_module_has_a_duration_of_its_own() -> None:
    found = {
        f"{path.relative_to(CLIENT)}:{value.lineno}"
        for path in sorted(CLIENT.rglob("*.py"))
        for value in given(ast.parse(path.read_text()))
        if has_seconds(value)
    }
    assert found == set()
