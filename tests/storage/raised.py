"""Which error classes and codes the product raises, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from storage import errors

ROOT = Path(__file__).parents[2]
ROOMS = ("storage", "gpu", "tasks", "flows")
CLASSES = {
    name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.TidegateError)
}
HELPERS = {
    "misfit": ("ReferenceInvalid", 3), "_corrupt": ("ArtifactCorrupt", -1), "illegal": ("IllegalTransition", 4),
    "_out_of_place": ("ContinuationInvalid", 3), "refused": ("ResourceInvalid", 3),
    "_mismatch": ("AckMismatch", 4), "Misfit": ("AckMismatch", 2),
}  # fmt: skip
"""Functions that make an error of a class, with the code as this argument or by its name."""


def raised() -> dict[tuple[str, str], str]:
    """(class, code) -> where it is made first. Codes that are computed are not among them."""
    found: dict[tuple[str, str], str] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call):
                    for pair in _made(call):
                        found.setdefault(pair, f"{path.relative_to(ROOT)}:{call.lineno}")
    return found


def _made(call: ast.Call) -> Iterator[tuple[str, str]]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    kind, place = HELPERS.get(name, (name, None))
    if kind not in CLASSES:
        return
    stated = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    if place is not None and len(call.args) > max(place, 2):
        stated.append(call.args[place])
    if not stated and (
        name in ("illegal", "_mismatch", "Misfit") or any(keyword.arg == "expected" for keyword in call.keywords)
    ):
        yield kind, CLASSES[kind].default_code
    for code in stated:
        for choice in (code.body, code.orelse) if isinstance(code, ast.IfExp) else (code,):
            if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
                yield kind, choice.value or CLASSES[kind].default_code
