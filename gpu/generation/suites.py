"""A worker's side of evaluation: agents of the suites, made at their first dispatch, and the ends of plain attempts.

Their turns are counted and dropped: a plain result is a reward, a number of tokens and the versions behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu.environments.agent import Agent, RolloutSink, Turned
from gpu.environments.resources import Reply
from gpu.environments.tools import Exported
from gpu.rollout.messages import Dispatch, Identity, Outcome, PlainEnded
from storage.payload import TurnRow
from storage.schema import Receipt

MakeAgent = Callable[[str, RolloutSink], Agent]
"""The agent of a suite by its name, with the sink it reports to."""


class Suites:
    """Runs plain dispatches. `ended` takes what is to be reported."""

    def __init__(self, make: MakeAgent, ended: Callable[[PlainEnded], None]) -> None:
        self._make, self._ended = make, ended
        self._agents: dict[str, Agent] = {}
        self._turns: dict[Identity, list[TurnRow]] = {}

    async def run(self, dispatch: Dispatch) -> None:
        """One attempt, from scratch."""
        assert dispatch.plain is not None, "a plain dispatch"
        name = dispatch.plain.suite
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = self._make(name, self)
        try:
            await agent.run(dispatch, ())
        finally:
            self._turns.pop(dispatch.identity, None)

    def turn(
        self,
        dispatch: Dispatch,
        boundary: int,
        turned: Turned,
        state: bytes,
        revisions: dict[str, int],
        exports: Sequence[Exported],
    ) -> None:
        self._turns.setdefault(dispatch.identity, []).append(turned.call)

    def answered(self, dispatch: Dispatch, boundary: int, call: TurnRow) -> None:
        pass

    def intent(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        pass

    async def settled(self, dispatch: Dispatch) -> None:
        """Nothing goes on after a crash here: an attempt that is lost starts over, with sessions of its own."""

    def result(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        pass

    def end(self, dispatch: Dispatch, turned: Turned, receipts: tuple[Receipt, ...]) -> None:
        assert turned.row is not None, "the last turn says that it is done"
        rows = [*self._turns.get(dispatch.identity, ()), turned.call]
        numbers = [span.number for row in rows for span in row.spans]
        tokens = sum(row.num_generated for row in rows)
        self._ended(
            PlainEnded(dispatch.identity, Outcome.SEALED, tokens, min(numbers), max(numbers), turned.row.reward)
        )
