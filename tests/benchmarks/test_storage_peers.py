"""The comparison of storage runs, proves that each system holds the same rows, and counts flipped bits. The systems
that need packages of their own are not part of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "storage_peers.py"
SMALL = ["--rows", "1600", "--publications", "3", "--repeats", "1", "--flips", "6"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("system", ["tidegate", "pickle", "json_lines"])
def test_a_system_is_measured_and_its_bits_are_flipped(system: str) -> None:
    done = run("--systems", system, *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["systems"][system]
    assert found["1600"]["publish_s"]["count"] == 3
    assert 0 < found["1600"]["publish_s"]["p50"] <= found["1600"]["publish_s"]["p99"]
    assert found["1600"]["bytes_written"] > 32 * 512 * 8
    assert found["1600"]["read_s"] > 0
    flips = found["flips"]
    assert flips["trials"] == sum(flips[kind] for kind in ("error", "aborted", "hung", "equal", "silent")) == 6
    if system == "tidegate":
        assert (flips["error"], found["1600"]["restart_s"] > 0) == (6, True)
    if system == "pickle":
        assert flips["silent"] > 0


def test_more_publications_than_there_is_room_for_are_refused() -> None:
    done = run("--rows", "1600", "--publications", "30")
    assert done.returncode == 2
    assert "room for 30 publications" in done.stderr
