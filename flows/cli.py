"""`tidegate`: a thin command line over the same code as the flows.

    tidegate train   --config run.json [--set training.steps=10]    run the flow here
    tidegate resume  RUN [--storage URL]                            go on with a run, from its own settings
                         [--take-over]                              also when another flow run drives it (train as well)
    tidegate status  RUN                                            what a live run waits for; else where storage stands
    tidegate verify  RUN                                            prove the run from storage alone
    tidegate inspect RUN [--step N | --group N | --evaluations]     look into storage
    tidegate diff    RUN[@STEP] RUN[@STEP]                          how two published checkpoints differ
    tidegate fork    RUN[@STEP] NEW [--last-good]                   a new run from a checkpoint; also of a damaged run
    tidegate gc      RUN [--dry-run] [--pins]                       delete what crashes left and no record mentions
    tidegate quarantine list RUN                                    groups that spent their attempts, and why
    tidegate quarantine release RUN GROUP...                        give them another budget
    tidegate discard RUN GROUP/SIBLING... --reason WHY               unfinished rollouts give up their turns
    tidegate hosts list RUN                                         hosts that wait for acknowledgements
    tidegate hosts gone RUN HOST BOOT                               one of their processes will never come back

Exit codes: 0 fine, 1 a fault, a run that is not sound, or one that somebody newer drives, 2 your input (nothing was
written), 75 the time of this attempt was over (`checkpoint.deadline`, SIGTERM, a notice): resume the run, 143 it was
ended at once by a second SIGTERM. `diff`: 0 equal, 1 different, 2 not compared, whatever the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows import settings
from flows.changes import load_config, settings_of
from flows.config import RunConfig
from flows.diff import add_diff
from flows.discard import add_discard
from flows.fork import add_fork
from flows.gc import add_gc
from flows.hosts import add_hosts
from flows.live import ask_manager, open_reached
from flows.quarantine import add_quarantine
from gpu.prepare import preflight
from storage import inspection
from storage.errors import ConfigurationRefused, TidegateError, UnknownRun
from storage.runs import open_run
from storage.verify import verify

DEFAULT_STORAGE = RunConfig().storage.url
TAKE_OVER = "take the run away from another flow run that drives it now; that one ends as RunFenced"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    settings.apply()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return parsed.run(parsed)
    except TidegateError as error:
        sys.stderr.write(f"tidegate: {type(error).__name__}\n  found:    {error.found}\n  expected: {error.expected}\n"
                         f"  do:       {error.action}\n")  # fmt: skip
        return max(error.exit_code, getattr(parsed, "trouble", 0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str, *, named: bool = True) -> Any:
        made = commands.add_parser(name, help=about, description=about)
        made.set_defaults(run=run)
        if named:
            made.add_argument("name", metavar="RUN")
            made.add_argument("--storage", default=DEFAULT_STORAGE, help="storage url (%(default)s)")
            made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    train = add("train", _train, "run the training flow in this process", named=False)
    train.add_argument("--config", type=Path, help="a RunConfig as JSON; defaults otherwise")
    train.add_argument("--set", action="append", default=[], metavar="PATH=JSON", help="e.g. --set training.steps=10")
    train.add_argument("--take-over", action="store_true", help=TAKE_OVER)
    resume = add("resume", _resume, "go on with a run, from the settings it was started with")
    resume.add_argument("--set", action="append", default=[], metavar="PATH=JSON")
    resume.add_argument("--take-over", action="store_true", help=TAKE_OVER)
    add("status", _status, "what every component of a run waits for")
    add("verify", _verify, "prove a run from storage alone; exit code 1 when it is not sound")
    inspect = add("inspect", _inspect, "look into a run's storage")
    inspect.add_argument("--step", type=int, help="one committed step")
    inspect.add_argument("--group", type=int, help="the whole history of one group")
    inspect.add_argument("--evaluations", action="store_true", help="every evaluation result")
    add_diff(commands)
    add_fork(commands)
    add_gc(commands)
    add_quarantine(commands)
    add_hosts(commands)
    add_discard(commands)
    return parser


# ---------------------------------------------------------------------- train, resume


def _train(parsed: argparse.Namespace) -> int:
    try:
        text = parsed.config.read_text() if parsed.config else "{}"
    except OSError as error:
        raise ConfigurationRefused(
            f"{parsed.config}: {error.strerror}", expected="a readable file", action="check the path"
        ) from error
    return _run_flow(load_config(text, parsed.set), parsed.take_over)


def _resume(parsed: argparse.Namespace) -> int:
    store = open_reached(parsed.storage)
    info = open_run(store, parsed.name)
    return _run_flow(settings_of(info.settings, parsed.name, store.url, parsed.set), parsed.take_over)


def _run_flow(config: RunConfig, take_over: bool) -> int:
    preflight(config.spec(config.run or "new"))
    from prefect.exceptions import TerminationSignal  # takes seconds to import, and nothing wrong should wait for that

    from flows.fenced import Superseded
    from flows.train import train

    try:
        asyncio.run(train(config, take_over=take_over))
    except Superseded as ended:
        raise ended.error from ended
    except TerminationSignal as ended:
        return 128 + ended.signal
    return 0


# ---------------------------------------------------------------------- looking


def _status(parsed: argparse.Namespace) -> int:
    store = open_reached(parsed.storage)
    found = inspection.summary(store, parsed.name)
    live = ask_manager(store, parsed.name, lambda manager: manager.status())
    if parsed.json:
        print(json.dumps({"storage": found, "live": live}, default=str))
        return 0
    console = Console()
    console.print(_table(f"run {parsed.name}", found))
    console.print(_table("live processes", live) if live else "no living manager; a retry of the flow run resumes it")
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    started = time.monotonic()
    console = Console(stderr=True)
    with console.status(f"verifying {parsed.name}") as shown:
        report = verify(open_reached(parsed.storage), parsed.name, lambda line: shown.update(line))
    if parsed.json:
        print(json.dumps({**report.as_dict(), "sound": report.sound}))
        return 0 if report.sound else 1
    Console().print(_table(f"run {parsed.name} in {time.monotonic() - started:.1f} s", report.as_dict()))
    for problem in report.problems:
        print(f"PROBLEM {problem}")
    print("SOUND" if report.sound else "NOT SOUND")
    return 0 if report.sound else 1


def _inspect(parsed: argparse.Namespace) -> int:
    store = open_reached(parsed.storage)
    if parsed.group is not None:
        found: Any = inspection.group_history(store, parsed.name, parsed.group)
    elif parsed.evaluations:
        found = inspection.evaluations(store, parsed.name)
    elif parsed.step is not None:
        found = next((step for step in inspection.steps(store, parsed.name) if step["step"] == parsed.step), None)
    else:
        found = inspection.summary(store, parsed.name)
    if not found:
        what = f"group {parsed.group}" if parsed.group is not None else f"step {parsed.step}"
        what = "evaluation" if parsed.evaluations else what
        raise UnknownRun(
            f"no {what} in run {parsed.name!r}", expected="something that happened", action="see `tidegate inspect RUN`"
        )
    if parsed.json:
        print(json.dumps(found, default=str))
    elif isinstance(found, list):
        for entry in found:
            print(json.dumps(entry, default=str))
    else:
        Console().print(_table(f"run {parsed.name}", found))
    return 0


def _table(title: str, values: dict[str, Any]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, json.dumps(value, default=str) if isinstance(value, dict | list) else str(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
