"""The benchmark of rollout control runs, and says what its readers look for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rollout.py"


@pytest.mark.parametrize("policy", ["sample", "group"])
def test_each_policy_is_measured_with_its_raw_limit_beside_it(policy: str) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--policy", policy, "--groups", "2000", "--batch", "64"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert {"cpu_us_per_group", "groups_per_s", "rss_growth_mb", "hold_ms", "raw_cpu_us"} <= set(found)
    assert found["groups"] >= 1800
    assert 0 < found["raw_cpu_us"] < found["cpu_us_per_group"]


def test_a_number_that_makes_no_sense_is_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--groups", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--groups must be at least 1" in done.stderr
