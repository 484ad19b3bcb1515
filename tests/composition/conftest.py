"""One Ray instance for the folder, on loopback, and runs that are ended whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from flows.settings import RAY
from tests.composition.rig import NAMESPACE, Rig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="package", autouse=True)
def ray_instance() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in RAY:
            patch.setenv(variable.name, variable.value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", str(ROOT))  # workers import this folder's environment
        ray.init(num_cpus=2, num_gpus=torch.cuda.device_count(), namespace=NAMESPACE, include_dashboard=False,
                 _node_ip_address="127.0.0.1",
                 log_to_driver=False, object_store_memory=128 << 20)  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()


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
