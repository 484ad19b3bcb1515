"""The benchmark of checkpoints runs, and says what its readers look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoints.py"


def measured(part: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--part", part, "--pairs", "1", "--scale", "0.15", "--folder", str(folder)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=200).stdout
    return json.loads(said)


def test_the_capture_is_measured_beside_a_plain_copy(tmp_path: Path) -> None:
    found = measured("capture", tmp_path)
    assert {"capture_s", "memcpy_s", "first_capture_s", "state_mb"} <= found.keys()


def test_publications_to_a_store_are_measured_beside_the_raw_client_and_leave_nothing(tmp_path: Path) -> None:
    found = measured("local", tmp_path)
    assert {"upload_ratio", "dedup_ratio", "peak_extra_mb", "lag_ms", "step_ms"} <= found.keys()
    assert found["unchanged_bytes"] < 10_000
    assert 0 < found["changed_mb"] < 85 / 2, "of 85 MB"
    assert found["peak_extra_mb"] < 2 * 85, "one copy and a process"
    assert os.listdir(tmp_path) == []


def test_a_number_that_makes_no_sense_is_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--pairs", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--pairs must be at least 1" in done.stderr
