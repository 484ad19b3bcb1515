"""Processes import only what they need, from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "modules", ["flows.train, flows.cli", "gpu.cluster", "gpu.actors, gpu.building, gpu.generation.worker"]
)
def test_driver_manager_and_worker_start_without_torch(modules: str, tmp_path: Path) -> None:
    """Importing torch takes seconds of CPU; three of five process kinds never compute with it."""
    code = f"import sys, {modules}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_storage_needs_neither_ray_nor_prefect_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys, storage.verify, storage.restore, storage.inspection, storage.opening, storage.retry\n"
        "assert not {'ray', 'prefect', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
