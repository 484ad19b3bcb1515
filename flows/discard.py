"""`tidegate discard`: unfinished rollouts give up their turns and start over."""

from __future__ import annotations

import argparse
from typing import Any

from flows.config import RunConfig
from flows.live import ask_manager, open_reached
from storage.errors import ConfigurationRefused


def add_discard(commands: Any) -> None:
    """The command's part of the command line."""
    about = "unfinished rollouts of a living run give up their turns and start over"
    one = commands.add_parser("discard", help=about, description=about)
    one.add_argument("name", metavar="RUN")
    one.add_argument("rollouts", metavar="GROUP/SIBLING", nargs="+", type=_rollout)
    one.add_argument("--reason", required=True, help="kept in the journal")
    one.add_argument("--storage", default=RunConfig().storage.url, help="storage url (%(default)s)")
    one.set_defaults(run=_discard)


def _rollout(text: str) -> tuple[int, int]:
    group, _, sibling = text.partition("/")
    return int(group), int(sibling)


def _discard(parsed: argparse.Namespace) -> int:
    store = open_reached(parsed.storage)

    async def ask(manager: Any) -> tuple[int]:
        return (await manager.discard_continuations(parsed.rollouts, parsed.reason),)

    answer = ask_manager(store, parsed.name, ask)
    if answer is None:
        raise ConfigurationRefused(
            f"no living manager of run {parsed.name!r} on the cluster this process is told of (RAY_ADDRESS)",
            expected="a run that is driven now",
            action="resume the run, then discard",
            code="manager",
        )
    print(f"{answer[0]} of {len(parsed.rollouts)} rollouts of run {parsed.name} had turns, and start over")
    return 0
