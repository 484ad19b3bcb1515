"""`tidegate diff`: how two published checkpoints differ. Like `diff` it ends with 0 when they are equal, with 1 when
they differ, and with 2 when they could not be compared."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.live import open_reached
from storage.clock import SystemClock
from storage.difference import Checkpoint, Difference, Published, TensorDifference, compare
from storage.errors import UnknownCheckpoint
from storage.numbers import Numbers
from storage.pins import holding

SHOWN = 40


def add_diff(commands: Any) -> None:
    """The command's part of the command line."""
    about = "how two published checkpoints differ; exit code 0 equal, 1 different, 2 not compared"
    diff = commands.add_parser("diff", help=about, description=about)
    for side in ("left", "right"):
        diff.add_argument(side, metavar="RUN[@STEP]", help="a checkpoint, the newest by default")
    diff.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    diff.add_argument("--right-storage", metavar="STORAGE", help="storage url of the second run, if it is another")
    diff.add_argument("--json", action="store_true", help="machine-readable output")
    diff.set_defaults(run=_diff, trouble=2)


def _diff(parsed: argparse.Namespace) -> int:
    (left_run, left_step), (right_run, right_step) = named_checkpoint(parsed.left), named_checkpoint(parsed.right)
    with Console(stderr=True).status("reading the journals") as shown:
        store = open_reached(parsed.storage)
        of_left = Published(store, left_run)
        other = open_reached(parsed.right_storage) if parsed.right_storage else store
        of_right = of_left if (other, right_run) == (store, left_run) else Published(other, right_run)
        left, right = of_left.at(left_step), of_right.at(right_step)
        with _held(left), _held(right):
            found = compare(left, right, shown.update)
    if parsed.json:
        print(json.dumps(_as_dict(left, right, found)))
    else:
        _show(Console(), left, right, found)
    return 0 if found.equal else 1


def _held(one: Checkpoint) -> AbstractContextManager[None]:
    return holding(one.store, one.manifest.run, one.name, "diff", SystemClock())


def named_checkpoint(text: str) -> tuple[str, int | None]:
    """Run and step of RUN[@STEP]. Raises `UnknownCheckpoint`."""
    run, at, step = text.partition("@")
    if at and not step.isdecimal():
        raise UnknownCheckpoint(
            f"checkpoint {text!r}",
            expected="RUN or RUN@STEP, with the number of a step",
            action="see `tidegate inspect`",
        )
    return run, int(step) if at else None


# ---------------------------------------------------------------------- for programs


def _as_dict(left: Checkpoint, right: Checkpoint, found: Difference) -> dict[str, Any]:
    values = asdict(found)
    for one, difference in zip(values["tensors"], found.tensors, strict=True):
        numbers = one.pop("numbers")
        if difference.numbers is not None:
            one.update(numbers, share=difference.numbers.share)
    return {"equal": found.equal, "left": _side(left), "right": _side(right), **values}


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "storage": checkpoint.store.url, "run": manifest.run, "step": manifest.step,
        "incarnation": manifest.incarnation, "state_digest": manifest.state_digest,
        "weights_digest": manifest.weights_digest,
    }  # fmt: skip


# ---------------------------------------------------------------------- for people


def _show(console: Console, left: Checkpoint, right: Checkpoint, found: Difference) -> None:
    for sign, side in (("-", left), ("+", right)):
        manifest = side.manifest
        console.print(f"{sign} {manifest.run}@{manifest.step} in {side.store.url}, incarnation {manifest.incarnation}, "
                      f"state {manifest.state_digest[:12]}", highlight=False, markup=False, soft_wrap=True)  # fmt: skip
    if found.fields:
        console.print(_fields_table(found))
    if found.tensors:
        console.print(_tensors_table(found.tensors))
    hidden = len(found.tensors) - SHOWN
    if hidden > 0:
        console.print(f"and {hidden} tensors more that differ; --json names them all")
    console.print(f"tensors: {len(found.tensors)} different, {found.num_equal} equal; "
                  f"bytes: {found.bytes_shared:,} shared, {found.bytes_left:,} only -, {found.bytes_right:,} only +, "
                  f"{found.bytes_read:,} read", highlight=False, soft_wrap=True)  # fmt: skip
    console.print("EQUAL" if found.equal else "DIFFERENT")


def _fields_table(found: Difference) -> Table:
    table = Table("field", "-", "+", title="what is not a tensor", title_justify="left")
    for name, (one, other) in found.fields.items():
        table.add_row(name, str(one), str(other))
    return table


def _tensors_table(tensors: list[TensorDifference]) -> Table:
    """New, gone and reshaped ones first, then those that changed most. Columns that would say nothing are left out."""
    shown = sorted(tensors, key=_weight)[:SHOWN]
    formed = any(one.numbers is None for one in shown)
    endless = any(one.numbers is not None and one.numbers.not_finite for one in shown)
    table = Table("tensor", "what", *(["form"] if formed else []), title="tensors", title_justify="left")
    table.columns[0].overflow, table.columns[0].ratio = "fold", 1
    for title in ("changed", "max abs", "max rel", "L2", *(["not finite"] if endless else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for one in shown:
        form = f"{one.left} -> {one.right}" if one.kind == "form" else one.left or one.right
        table.add_row(one.name, one.kind, *([form] if formed else []), *_values(one.numbers, endless))
    return table


def _values(numbers: Numbers | None, endless: bool) -> list[str]:
    if numbers is None:
        return []
    shown = [f"{numbers.share:.2%}", _short(numbers.max_abs), _short(numbers.max_rel), _short(numbers.l2)]
    return [*shown, _short(numbers.not_finite)] if endless else shown


def _weight(one: TensorDifference) -> tuple[bool, float]:
    return (False, 0.0) if one.numbers is None else (True, -(one.numbers.max_rel or 0.0))


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
