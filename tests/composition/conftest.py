"""One Ray instance for the folder, on loopback, and runs that are ended whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import servers
from tests.composition.rig import NAMESPACE, Rig


@pytest.fixture(scope="package", autouse=True)
def ray_instance() -> Iterator[None]:
    gpus = torch.cuda.device_count()
    with servers.ray_instance(num_cpus=2, num_gpus=gpus, namespace=NAMESPACE, object_store_memory=128 << 20):
        yield


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    """Makes a run in the test's folder."""
    made: list[Rig] = []

    def make(**changes: Any) -> Rig:
        made.append(Rig(tmp_path, **changes))
        return made[-1]

    yield make
    for rig in made:
        await rig.cluster.close()
