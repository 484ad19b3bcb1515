"""The reference of every setting, made from the code: `python -m flows.reference > docs/settings.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows.config import RunConfig
from flows.settings import PREFECT, RAY, Variable

HEAD = """\
# Settings

Made by `python -m flows.reference`; a test compares it with the code.

A run is described by one `RunConfig`: the parameter of the flow `train` (the form in the Prefect UI), the file of
`tidegate train --config`, and the target of `--set section.field=json`. Unknown fields are refused. Times are seconds,
sizes bytes, capacities groups unless a line says otherwise. What must not change when a run is resumed: the seed, the
model, the environment, `rollout.siblings` and `rollout.staleness`; everything else may.

Configurations that must deadlock are refused at start, with the arithmetic.
"""
ENVIRONMENT = """\
## Environment variables

Set in one place for the demo (`flows/settings.py`). On a cluster, set them in every process: the Ray nodes, the Prefect
server, its workers, and flow runs started by hand.

| variable | value | why |
| --- | --- | --- |
"""


def reference() -> str:
    """The whole page, in Markdown."""
    return HEAD + "".join(_sections()) + "\n" + ENVIRONMENT + "".join(_variables((*RAY, *PREFECT)))


def _sections() -> Iterator[str]:
    top = {name: field for name, field in RunConfig.model_fields.items() if not _section(field)}
    yield "\n## Run\n\n" + _table("", top)
    for name, field in RunConfig.model_fields.items():
        section = _section(field)
        if section:
            yield f"\n## {name}\n\n" + _table(f"{name}.", section.model_fields)
            for inner, listed in section.model_fields.items():
                part = _listed(listed.annotation)
                if part:
                    yield "\n" + _table(f"{name}.{inner}[].", part.model_fields)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _listed(kind: Any) -> type[BaseModel] | None:
    """The section of which a field holds a list."""
    first = next(iter(typing.get_args(kind)), None)
    listed = typing.get_origin(kind) is tuple and isinstance(first, type) and issubclass(first, BaseModel)
    return first if listed else None


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    rows: list[str] = []
    for name, field in fields.items():
        default = "" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        rows.append(f"| `{prefix}{name}` | {_kind(field.annotation)} | {default} | {_about(field)} |\n")
    return "| setting | values | default | |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _about(field: FieldInfo) -> str:
    return ". ".join(part for part in (field.title, field.description) if part)


def _kind(kind: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}s"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if one is type(None) else _kind(one) for one in arguments)
    names = {int: "integer", float: "number", str: "text", bool: "true, false"}
    return names.get(origin or kind, "object")


def _variables(variables: Sequence[Variable]) -> Iterator[str]:
    for one in variables:
        yield f"| `{one.name}` | `{one.value}` | {one.reason} |\n"


if __name__ == "__main__":
    print(reference(), end="")
