"""`tidegate fork`: a new run from a published checkpoint of another one, and the way out of a damaged journal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from flows.changes import settings_of
from flows.config import RunConfig
from flows.diff import named_checkpoint
from flows.live import open_reached
from storage.clock import SystemClock
from storage.errors import FingerprintMismatch, ResourceUnavailable
from storage.fork import Fork, fork_run
from storage.runs import RunInfo, make_run, open_run


def add_fork(commands: Any) -> None:
    """The command's part of the command line."""
    about = "a new run from a published checkpoint of another one, which stays as it is"
    fork = commands.add_parser("fork", help=about, description=about)
    fork.add_argument("source", metavar="RUN[@STEP]", help="a checkpoint, by default the newest that can be read")
    fork.add_argument("new", metavar="NEW", help="name of the new run; `tidegate resume NEW` goes on with it")
    fork.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    fork.add_argument("--to", metavar="STORAGE", help="storage url of the new run, if it is another")
    fork.add_argument("--set", action="append", default=[], metavar="PATH=JSON", help="settings of the new run that "
                      "differ from those RUN was started with")  # fmt: skip
    fork.add_argument("--last-good", action="store_true", help="of a damaged journal: from the last checkpoint before "
                      "the damage; lists what is lost")  # fmt: skip
    fork.add_argument("--json", action="store_true", help="machine-readable output")
    fork.set_defaults(run=_fork)


def _fork(parsed: argparse.Namespace) -> int:
    run, step = named_checkpoint(parsed.source)
    source = open_reached(parsed.storage)
    target = open_reached(parsed.to) if parsed.to else source
    if target.url.startswith("memory:"):
        raise ResourceUnavailable(
            f"storage {target.url} ends with this command",
            expected="a store that the new run reaches",
            action="name a folder or another shared place with --to",
        )
    info = open_run(source, run)
    clock = SystemClock()
    made = _described(info, settings_of(info.settings, parsed.new, target.url, parsed.set), parsed.new, clock.wall())
    with Console(stderr=True).status("reading the journal") as shown:
        fork = fork_run(
            source, run, target, made, step=step, last_good=parsed.last_good, clock=clock,
            say=lambda line: shown.update(line),
        )  # fmt: skip
    if parsed.json:
        print(json.dumps(fork.as_dict()))
    else:
        _show(Console(), fork, parsed.last_good)
    return 0


def _described(info: RunInfo, config: RunConfig, new: str, now: float) -> RunInfo:
    """The new run, as if it began by itself. Raises `FingerprintMismatch` for what the weights' digest depends on."""
    spec = config.spec(new)
    made = make_run(
        run=new, created=now, num_siblings=spec.limits.num_siblings, staleness=spec.limits.staleness,
        fingerprints=dict(spec.fingerprints), settings=dict(spec.settings),
    )  # fmt: skip
    old, wanted = (_dtype(one) for one in (info, made))
    if old != wanted:
        raise FingerprintMismatch(
            f"generation.dtype = {wanted}",
            expected=f"{old}, as run {info.run!r} was started with: the journal names the weights of the checkpoint by"
            " their digest in it",
            action="leave it as it was",
            code="fingerprint_dtype",
        )
    return made


def _dtype(info: RunInfo) -> str:
    return RunConfig.model_validate(info.settings).resolved().generation.dtype


def _show(console: Console, fork: Fork, last_good: bool) -> None:
    for line in [*_taken(fork), *_left(fork), *_lost(fork, last_good)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _taken(fork: Fork) -> list[str]:
    return [
        *[f"passed over: {one}" for one in fork.rejected],
        f"{fork.new} in {fork.new_storage} is a fork of {fork.run}@{fork.step} in {fork.storage}",
        f"inherited: state {fork.state_digest[:12]} after step {fork.step}, record {fork.position} of the journal;"
        f" {fork.size:,} bytes, {fork.written:,} written",
        f"inherited: {fork.frontier} prompts handed out, of which {fork.consumed} trained, {fork.discarded} discarded,"
        f" {fork.quarantined} quarantined; the other {fork.requeued} start whole again",
    ]


def _left(fork: Fork) -> list[str]:
    steps = fork.steps_left
    lines: list[str] = []
    if steps:
        lines.append(f"not inherited: {len(steps)} later steps ({steps[0]} to {steps[-1]}); their {fork.groups_left}"
                     " prompts are trained again")  # fmt: skip
    if fork.evaluations_left:
        lines.append(f"not inherited: {fork.evaluations_left} evaluation results, which stay with {fork.run}")
    if fork.evaluations_dropped:
        due = ", ".join(fork.evaluations_dropped)
        lines.append(f"not inherited: evaluations that were due of weights that only {fork.run} had: {due}")
    for name, value in fork.settings_left.items():
        lines.append(f"not inherited: {name} = {value}, which {fork.run} had been changed to (--set {name}=...)")
    return lines


def _lost(fork: Fork, last_good: bool) -> list[str]:
    go_on = f"go on with it: tidegate resume {fork.new}"
    if fork.damage is None:
        return [*(["the journal is whole: nothing is lost"] if last_good else []), go_on]
    damage = fork.damage
    return [
        f"damaged: slot {damage['slot']}, [{damage['code']}] {damage['found']}",
        f"lost: {damage['segments_lost']} segments from there on, {damage['segments_unreadable']} of them unreadable;"
        " steps and results above are those that the others and the good part name",
        go_on,
    ]
