"""`make demo MODEL=tiny`, whole: server, worker, Ray, two kills with SIGKILL, the Retry button, the proof."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli import main
from flows.demo import RUN, Kill, plan_kills
from flows.proof import live_at_deaths

LAST = re.compile(
    r"DEMO OK steps=(?P<steps>\d+) kills=2 consumed=(?P<consumed>\d+) lost=0 trained_twice=0 reused=(?P<reused>\d+) "
    r"redone_steps=(?P<redone>\d+) regenerated=(?P<regenerated>\d+) reward_first=(?P<first>\d\.\d+) "
    r"reward_last=(?P<last>\d\.\d+)"
)


def left_of(root: Path) -> list[str]:
    """What still lives of a demo after the moment that Ray's workers take to notice that their node is gone."""
    deadline = time.monotonic() + 20.0
    while (found := processes_of(root)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def processes_of(root: Path) -> list[str]:
    """Command lines of living processes that name the demo's folder, or were started with it in their environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            known = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(root).encode() in known and state != "Z" and folder.name != str(os.getpid()):
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.timeout(540)
def test_the_tiny_demo_is_killed_twice_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.demo", "--model", "tiny", "--seed", "7", "--root", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = demo.communicate(timeout=500)
    finally:
        demo.send_signal(signal.SIGTERM)
        demo.wait(30)
    lines = said.rstrip().splitlines()
    match = LAST.fullmatch(lines[-1])
    assert demo.returncode == 0, said[-3000:]
    assert match, said[-3000:]
    found = {name: float(value) for name, value in match.groupdict().items()}
    root = tmp_path / "demo-tiny"
    assert found["consumed"] == found["steps"] * 32
    assert found["reused"] > 0
    assert found["regenerated"] <= live_at_deaths(str(root / "store"), RUN)
    assert found["last"] > found["first"] + 0.2, "as the demo itself demands; how far a seed gets varies"
    kills = [line for line in lines if "KILLED -9" in line]
    assert len(kills) == 2
    assert sum("manager" in line for line in kills) == 1, "one kill of the flow alone, one of everything"
    assert (root / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert main(["verify", "demo", "--storage", str(root / "store")]) == 0
    assert left_of(root) == [], "the demo stops what it started"


@pytest.mark.slow
def test_a_terminated_demo_stops_what_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "flows.demo", "--model", "tiny", "--root", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert demo.stdout is not None
        assert any("waiting for a manager" in line for line in demo.stdout), "the demo ended early"
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
        assert demo.returncode == 128 + signal.SIGTERM
        assert left_of(tmp_path) == []
    finally:
        demo.kill()


def test_the_seed_draws_order_and_moments_of_the_kills() -> None:
    plans = [plan_kills(seed, 200) for seed in range(40)]
    assert plan_kills(3, 200) == plans[3]
    assert len({(one.after, two.after) for one, two in plans}) > 30
    assert {one.everything for one, _ in plans} == {True, False}
    for one, two in plans:
        assert one.everything is not two.everything
        assert 0 < one.after < two.after < 200
        assert isinstance(one, Kill)
