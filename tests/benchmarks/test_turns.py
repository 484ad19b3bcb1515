"""The benchmark of turns runs, and says what its readers look for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "turns.py"


def test_turns_are_measured_plain_and_acting_and_beside_a_tool_call() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--rollouts", "64", "--turns", "3", "--steps", "3"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert {"bytes_ratio", "cpu_us_per_boundary", "max_wait_ms", "rewrite_bytes_ratio"} <= set(found)
    assert 1 < found["bytes_ratio"] < found["acting"]["bytes_ratio"]
    assert found["checkpoints"] == 3
    assert found["rewrite_bytes_ratio"] > 3


def test_numbers_that_make_no_sense_are_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--rollouts", "9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--rollouts is a multiple of 8" in done.stderr
