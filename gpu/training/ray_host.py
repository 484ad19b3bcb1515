"""The trainer's host where processes share Ray's object store."""

from __future__ import annotations

import ray

from gpu.training.host import TrainerHost
from storage.buffers import NamedBuffer


class RayTrainerHost(TrainerHost):
    """Hands weights out through the object store: one copy there, shared by all engines."""

    def freeze(self, weights: dict[str, NamedBuffer]) -> object:
        return [ray.put(weights)]
