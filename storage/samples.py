"""From turn rows to what a trainer needs: `assemble` joins the turns of a finished rollout, or says why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import ReferenceInvalid
from storage.payload import TurnRow, VersionSpan


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished rollout as the trainer needs it. Arrays have one value per token of the conversation [T]:
    ids int32, behaviour logprobs float32, mask int8 (1 = generated). `spans` count generated tokens."""

    group: int
    sibling: int
    attempt: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.int8]
    spans: tuple[VersionSpan, ...]
    reward: float


def assemble(rows: Sequence[TurnRow], group: int, sibling: int) -> Sample:
    """Join the turns of one rollout. Raises `ReferenceInvalid`: a gap, an overlap, another owner, a turn that does not
    extend the one before, token columns that do not fit together."""
    where = f"rollout {group}/{sibling}"
    if not rows:
        raise misfit(where, "no rows", "one row per turn", "missing")
    position, attempt, generated = 0, -1, 0
    spans: list[VersionSpan] = []
    for turn, row in enumerate(rows):
        count = _check_row(row, where, group, sibling, turn, position, attempt)
        spans += [VersionSpan(span.incarnation, span.number, generated + span.end) for span in row.spans]
        position += len(row.tokens)
        generated += count
        attempt = row.attempt
    if not rows[-1].done or any(row.done for row in rows[:-1]):
        raise misfit(where, "the last turn is not the end", "exactly the last turn to be done", "missing")
    return Sample(
        group,
        sibling,
        attempt,
        _join([row.tokens for row in rows]),
        _join([row.logprobs for row in rows]),
        _join([row.mask for row in rows]),
        tuple(spans),
        rows[-1].reward,
    )


def _join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_row(row: TurnRow, where: str, group: int, sibling: int, turn: int, position: int, attempt: int) -> int:
    """The number of generated tokens of a row that fits."""
    if (row.group, row.sibling) != (group, sibling):
        raise misfit(where, f"a row of {row.group}/{row.sibling}", "its own rows", "conflict")
    if row.turn != turn:
        raise misfit(where, f"turn {row.turn}", f"turn {turn}", "gap" if row.turn > turn else "overlap")
    if row.start != position:
        raise misfit(where, f"turn {turn} at token {row.start}", f"token {position}", "prefix")
    if row.attempt < attempt:
        raise misfit(where, f"attempt {row.attempt} after {attempt}", "attempts that do not go back", "conflict")
    if not len(row.tokens) == len(row.logprobs) == len(row.mask):
        raise misfit(where, "token columns of different lengths", "one logprob and mask per token", "row_digest")
    generated = row.num_generated
    check_spans(row.spans, generated, where)
    return generated


def check_spans(spans: Sequence[VersionSpan], generated: int, where: str) -> None:
    """Spans must cover the generated tokens exactly and never go back in version."""
    ends = [0, *(span.end for span in spans)]
    order = [(span.incarnation, span.number) for span in spans]
    if ends[-1] != generated or any(a >= b for a, b in pairwise(ends)) or order != sorted(order):
        raise misfit(
            where, f"version spans {spans}", f"spans over {generated} tokens in ascending version order", "span"
        )


def misfit(where: str, found: str, expected: str, code: str) -> ReferenceInvalid:
    return ReferenceInvalid(
        f"{where}: {found}", expected=expected, action="the payload does not belong together; run verify", code=code
    )
