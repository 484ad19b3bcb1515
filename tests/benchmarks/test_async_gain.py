"""The benchmark of what asynchrony gains keeps running, keeps its form, and keeps the staleness bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "async_gain.py"
FIGURES = {
    "gain", "gain_over_drain", "max_staleness", "mean_staleness", "wasted_share", "longest_share_source",
    "longest_share_trained",
}  # fmt: skip


def test_a_short_run_reports_every_figure_and_stays_within_each_bound() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--groups", "384", "--tails", "4.3"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert set(result) == {"4.3", "about"}
    assert set(result["about"]) == {"settings", "machine", "tails"}
    assert list(result["4.3"]) == ["0", "1", "2", "4"]
    for bound, figures in result["4.3"].items():
        assert set(figures) == FIGURES
        assert figures["max_staleness"] <= int(bound)
        assert figures["wasted_share"] == 0
        assert figures["gain"] > 0
        assert figures["gain_over_drain"] >= 1
