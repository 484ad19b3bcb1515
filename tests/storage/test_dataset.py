"""The example in docs/storage.md runs, and what it says of a run is what the library says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from storage.history import read_all
from storage.journal import fold_segment
from storage.ledger import Ledger
from storage.low import read_low
from storage.memory import MemoryStore
from storage.reader import PayloadReader
from storage.runs import RunPaths, open_run
from storage.schema import StepCommitted, StepsReverted
from storage.segment import encode_segment
from tests.rollout.building import limits
from tests.simulation.world import RUN, World

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"


def example() -> str:
    """The code of the page's section on datasets."""
    section = PAGE.read_text().partition("## A run's journal as a dataset")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert '".tidegate/store/runs/RUN"' in code
    return code


def on_disk(store: MemoryStore, folder: Path, inline: bool) -> Path:
    """The run as files; blocks that travelled in the journal lie beside it unless `inline`."""
    paths = RunPaths(RUN)
    for key in store.list(paths.history) if inline else []:
        write(folder / key, store.read(key))
    low = read_low(store, RUN) if inline else 0
    for segment in read_all(store, RUN):
        if segment.header.slot < low:
            continue
        rows = segment.rows
        if not inline:
            for row in rows:
                if row.blob is not None:
                    write(folder / paths.block(row.record.block), row.blob)  # type: ignore[attr-defined]
            rows = [row._replace(blob=None) for row in rows]
        write(folder / paths.segment(segment.header.slot), encode_segment(segment.header, rows)[0])
    return folder / paths.root


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def ask(run: Path) -> tuple[list[Any], list[Any]]:
    names: dict[str, Any] = {}
    exec(example().replace(".tidegate/store/runs/RUN", str(run)), names)
    return names["groups"].fetchall(), names["steps"].fetchall()


def expected(store: MemoryStore) -> list[Any]:
    """(step, version, group, versions that generated it, rewards), as leases and payloads have it."""
    ledger, found = Ledger(open_run(store, RUN).num_siblings), []
    reader = PayloadReader(store, RUN)
    for segment in read_all(store, RUN):
        fold_segment(ledger, segment)
        for row in segment.rows:
            if isinstance(row.record, StepCommitted):
                lease = ledger.steps[row.record.step].lease
                for group in lease.groups:
                    turns = [turn for rows in group.rows for turn in reader.rows(rows, ledger.blocks)]
                    versions = sorted({span.number for turn in turns for span in turn.spans})
                    found.append((lease.step, lease.version, group.ordinal, versions, list(group.rewards)))
            elif isinstance(row.record, StepsReverted):
                found = [one for one in found if one[0] <= row.record.to_step]
    return sorted(found)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("snapshot_every", [0, 4])
def test_the_example_says_what_the_library_says(
    inline: bool, multi_turn: bool, snapshot_every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(5, length=12, multi_turn=multi_turn, limits=limits())
    world.snapshot_every = snapshot_every
    world.filter = lambda rewards: ""
    world.run(chaos=300)
    assert (read_low(world.store, RUN) > 0) == (snapshot_every > 0)
    groups, steps = ask(on_disk(world.store, tmp_path, inline))
    assert groups == expected(world.store)
    assert len(groups) == 12
    for step, num_groups, staleness, reward in steps:
        of_step = [group for group in groups if group[0] == step]
        assert num_groups == len(of_step)
        assert staleness == max(version - versions[0] for _, version, _, versions, _ in of_step)
        assert reward == pytest.approx(sum(sum(rewards) / len(rewards) for *_, rewards in of_step) / len(of_step))
    assert "generated_by" in capsys.readouterr().out


def test_steps_that_were_taken_back_trained_nothing(tmp_path: Path) -> None:
    world = World(0, length=12, limits=limits())
    world.filter = lambda rewards: ""
    world.requeues = True
    world.run(chaos=300)
    assert world.control.ledger.counts["groups_reverted"] > 0
    assert ask(on_disk(world.store, tmp_path, True))[0] == expected(world.store)
