"""Run a campaign.

    python -m tests.faults.campaign --faults 40                 both places, until so many faults were done
    python -m tests.faults.campaign --place s3 --seed 17        one run again

A failing run prints the command that repeats its plan and ends the campaign with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.stack import end_politely
from tests import servers
from tests.faults.campaign.places import LocalPlace, S3Place, local_place, s3_place
from tests.faults.campaign.plan import draw
from tests.faults.campaign.run import EFFECTS, MARK, Broken, Run, effects
from tests.faults.house import small

EVENTS = 14
EPOCHS = 5
FIGURES = {"reused": "rollouts_reused", "regenerated": "rollouts_regenerated", "continued": "rollouts_continued",
           "redone": "steps_redone", "consumed": "consumed", "lost": "lost", "trained twice": "trained_twice",
           "incarnations": "incarnations"}  # fmt: skip


def config_of(place: LocalPlace | S3Place, seed: int, address: str) -> RunConfig:
    run = f"{place.name}-{seed}-{uuid.uuid4().hex[:4]}"
    config = small(
        environment={"name": "reverse", "options": {"letters": 2}, "epochs": EPOCHS},
        generation={"engines": 1, "workers": 2, "cpus": 0.1},
        training={"cpus": 0.1},
        storage={"url": place.url(run), "flush_interval": 0.02, "commit_deadline": 120.0},
        cluster={
            "address": address, "namespace": run, "restart_pause": 0.1, "alive_deadline": 5.0, "lease_deadline": 90.0,
            "start_deadline": 120.0,
        },
    )  # fmt: skip
    return config.model_copy(update={"run": run, "seed": seed})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--place", choices=["local", "s3", "both"], default="both")
    parser.add_argument("--faults", type=int, default=40, help="stop when so many faults were done")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--json", type=Path, help="also write the summary there")
    parsed = parser.parse_args()
    end_politely()
    root = Path(tempfile.mkdtemp(prefix="tidegate-campaign-"))
    with ExitStack() as stack:
        os.environ[MARK] = uuid.uuid4().hex
        places: list[LocalPlace | S3Place] = []
        if parsed.place in ("local", "both"):
            places.append(stack.enter_context(local_place(root)))
        if parsed.place in ("s3", "both"):
            places.append(stack.enter_context(s3_place(root)))
        address = _ray(stack)
        return _campaign(parsed, places, address, root)


def _ray(stack: ExitStack) -> str:
    # Ray writes it so. A machine that does other things too must not starve the run.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    return stack.enter_context(servers.ray_instance(num_cpus=8, object_store_memory=256 << 20))


def _campaign(parsed: argparse.Namespace, places: list[LocalPlace | S3Place], address: str, root: Path) -> int:
    done: dict[str, Counter[str]] = {}
    figures: Counter[str] = Counter()
    began, runs = time.monotonic(), 0
    for place, seed in _order(parsed, places):
        if parsed.seed is None and sum(done_["faults"] for done_ in done.values()) >= parsed.faults:
            break
        config = config_of(place, seed, address)
        steps = _steps(config)
        run = Run(draw(seed, place.name, steps, EVENTS), place, config, root / f"{config.run}.log")
        print(f"[{time.monotonic() - began:7.1f} s] {place.name} seed {seed}: "
              f"{'; '.join(event.kind for event in run.plan.events)}", flush=True)  # fmt: skip
        try:
            report = run.go()
        except Broken as error:
            print(
                f"BROKEN {error}\nrepeat: python -m tests.faults.campaign --place {place.name} --seed {seed}",
                flush=True,
            )
            return 1
        runs += 1
        found = {name: getattr(report, field) for name, field in FIGURES.items()}
        figures.update(found)
        figures.update(run.counts)
        siblings = config.rollout.siblings
        for kind, grown in effects(run.direct, config.run, siblings, run.struck).items():
            never = {"lost": found["lost"], "trained twice": found["trained twice"]}
            done.setdefault(kind, Counter()).update(
                {"faults": run.hits[kind], "resumed": run.resumed[kind], **grown, **never}
            )
        print(f"[{time.monotonic() - began:7.1f} s]   sound: {dict(run.hits)} {found} {dict(run.counts)}", flush=True)
    _summary(done, figures, runs, time.monotonic() - began, parsed.json)
    return 0


def _order(
    parsed: argparse.Namespace, places: list[LocalPlace | S3Place]
) -> Iterator[tuple[LocalPlace | S3Place, int]]:
    seed = parsed.first if parsed.seed is None else parsed.seed
    while True:
        for place in places:
            yield place, seed
        if parsed.seed is not None:
            return
        seed += 1


def _steps(config: RunConfig) -> int:
    spec = config.spec(config.run)
    length = spec.source.stream(spec.source.environment_of()).length
    assert length is not None
    return length // spec.limits.batch


def _summary(
    done: dict[str, Counter[str]], figures: Counter[str], runs: int, seconds: float, path: Path | None
) -> None:
    table = Table(title=f"{runs} runs, {sum(one['faults'] for one in done.values())} faults, {seconds:.0f} s")
    columns = ("faults", "resumed", *EFFECTS, "lost", "trained twice")
    for column in ("kind", *columns):
        table.add_column(column)
    for kind in sorted(done):
        table.add_row(kind, *(str(done[kind][name]) for name in columns))
    console = Console(width=140)
    console.print(table)
    console.print(", ".join(f"{name} {figures[name]}" for name in sorted(figures)))
    if path is not None:
        path.write_text(
            json.dumps({"runs": runs, "seconds": round(seconds, 1), "kinds": done, "figures": figures}, indent=1)
        )


if __name__ == "__main__":
    sys.exit(main())
