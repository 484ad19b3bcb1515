"""What a trainer answers, without torch."""

from __future__ import annotations

import msgspec


class Trained(msgspec.Struct, frozen=True):
    """What a step came to. `weights_digest` is that of the weights as engines receive them."""

    step: int
    lease: int
    state_digest: str
    weights_digest: str
    metrics: dict[str, float]


class TrainerStatus(msgspec.Struct, frozen=True):
    """`clean`: the state is exactly the one of `state_digest`. `busy`: what runs now, "" when nothing. `ahead_of`: the
    state before the last step, when the trainer can still repeat its answer for that step. `uploaded` of `upload`
    bytes of the publication under way, or of the last one, are in the store."""

    step: int
    state_digest: str
    weights_digest: str
    clean: bool
    busy: str
    ahead_of: str
    uploaded: int = 0
    upload: int = 0


class RestoredBase(msgspec.Struct, frozen=True):
    """Where a restore starts, and why newer checkpoints were not taken."""

    step: int
    rejected: tuple[str, ...]
