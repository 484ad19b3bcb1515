"""Processes import only what they need, from any folder."""

from __future__ import annotations

import os
import shutil
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


def test_the_wheel_holds_every_room_and_works_from_any_folder(tmp_path: Path) -> None:
    """What a Ray node or a worker gets: the wheel, in a folder that is not the project's."""
    project = Path(__file__).parents[2]
    source, wheels, site, elsewhere = (tmp_path / name for name in ("source", "wheels", "site", "elsewhere"))
    elsewhere.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, source)
    for room in ("flows", "tasks", "gpu", "storage"):
        shutil.copytree(project / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source],
        check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("tidegate-")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, timeout=120)
    modules = [
        str(path.relative_to(project).with_suffix("")).replace("/", ".")
        for room in ("flows", "tasks", "gpu", "storage")
        for path in (project / room).rglob("*.py")
        if path.name != "__init__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(site)!r}), module.__file__\n"
        "from flows.config import RunConfig\n"
        "RunConfig(run='r').spec('r')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", code], cwd=elsewhere, check=True, timeout=120, env=env)
    assert (site / "bin" / "tidegate").exists()
    assert not list(elsewhere.iterdir())
