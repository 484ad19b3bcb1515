"""`make demo`: a real run from start to proof, killed twice on the way.

A Prefect server, the deployments of prefect.yaml, a worker and a Ray cluster of its own; asynchronous GRPO of a real
model; one SIGKILL of the flow process alone and one of the flow process and every Ray actor, both in the middle of a
step, each followed by what the UI's Retry button does; at the end `verify` proves the result from storage. The seed
draws the order of the kills and their moments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.config import RunConfig
from flows.proof import judge, summary
from flows.seaweed import exported, running_seaweed
from flows.stack import Stack, end_politely, free_port, running_stack
from gpu.models.config import ModelSpec, find
from gpu.spec import RunSpec
from storage.errors import ActorLost, TidegateError
from storage.inspection import steps as committed_steps
from storage.opening import open_store
from storage.verify import verify

RUN = "demo"
SETTLE_S = 3.0  # a person needs a moment to see the crash and press Retry
PRESSES = 4


def demo_config(model: str, seed: int, storage: str, cache: str) -> RunConfig:
    """The settings of both demos; every value that differs from the defaults is here."""
    common: dict[str, Any] = {"run": RUN, "seed": seed, "storage": {"url": storage}}
    if model == "tiny":
        return RunConfig.model_validate({
            **common,
            "environment": {"name": "reverse"},
            "rollout": {"siblings": 16, "batch": 32, "staleness": 2},
            "generation": {"slots": 512, "max_length": 16},
            "training": {"steps": 200, "learning_rate": 2e-3},
            "checkpoint": {"every": 20},
            "flow": {"steps_per_task": 10},
        })  # fmt: skip
    return RunConfig.model_validate({
        **common,
        "model": {"name": "smollm2-135m", "cache": cache},
        "environment": {"name": "addition"},
        "rollout": {
            "siblings": 8, "batch": 8, "staleness": 2, "executing": 64, "completed": 24, "retained": 24, "backoff": 4,
        },
        "generation": {"slots": 64, "max_length": 96, "concurrency": 64},
        "training": {"steps": 20, "learning_rate": 1e-5, "warmup": 0, "micro_positions": 600},
        "checkpoint": {"every": 5},
        "cluster": {"start_deadline": 300.0},
    })  # fmt: skip


@dataclass
class Kill:
    """One planned death: from step `after` on, at the next moment in the middle of a step."""

    after: int
    everything: bool
    delay: float
    live: int = 0
    done: bool = False


@dataclass
class Demo:
    """The demo's own view of the run: it looks through the same calls as anybody."""

    config: RunConfig
    spec: RunSpec
    stack: Stack
    kills: list[Kill]
    flow_run: str = ""
    started: float = field(default_factory=time.monotonic)
    shown: object = ()
    shown_at: float = 0.0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    # ------------------------------------------------------------------ Prefect

    async def start(self) -> None:
        """Create the flow run from the deployment, as the UI's form does."""
        from prefect import get_client

        async with get_client() as client:
            deployment = await client.read_deployment_by_name("train/train")
            parameters = {"config": self.config.model_dump(mode="json")}
            created = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        self.flow_run = str(created.id)
        self.say(f"flow run {created.name}: {self.stack.ui}/runs/flow-run/{created.id}")

    async def state(self) -> str:
        from prefect import get_client

        async with get_client() as client:
            found = (await client.read_flow_run(self._id())).state
        return str(found.type.value) if found else "UNKNOWN"

    def _id(self) -> Any:
        from uuid import UUID

        return UUID(self.flow_run)

    async def retry(self) -> None:
        """Exactly what the Retry button sends."""
        from prefect import get_client
        from prefect.client.schemas.objects import State, StateType

        async with get_client() as client:
            await client.set_flow_run_state(
                self._id(),
                State(type=StateType.SCHEDULED, name="AwaitingRetry", message="Retry from the UI"),
                force=True,
            )

    # ------------------------------------------------------------------ watching

    async def watch(self) -> None:
        """Show progress, kill at the planned moments, retry after each, until the run is complete."""
        asked = 0.0
        while True:
            status = await self.status()
            self.show(status)
            kill = next((kill for kill in self.kills if not kill.done), None)
            if kill and status and self.ripe(kill, status):
                await asyncio.sleep(kill.delay)
                if await self.strike(kill):
                    await self.revive()
                continue
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                state = await self.state()
                self.stack.check()
                if state == "COMPLETED":
                    return
                if state in ("FAILED", "CRASHED", "CANCELLED"):
                    raise ActorLost(
                        f"the flow run ended as {state} without being killed",
                        expected="it to go on",
                        action=f"look at {self.stack.root / 'logs' / 'worker.log'}",
                    )
            await asyncio.sleep(0.05)

    async def status(self) -> dict[str, Any] | None:
        """What the manager says; None while there is none."""
        from gpu.actors import Remote, find_actor

        with contextlib.suppress(ActorLost, TimeoutError):
            async with asyncio.timeout(5.0):
                return await Remote("manager", find_actor(self.spec.namespace, self.spec.run, "manager")).status()
        return None

    def show(self, status: dict[str, Any] | None) -> None:
        """A line when the step moved (at most one a second), or every five seconds with what is waited for."""
        now = time.monotonic()
        key = (status["incarnation"], status["step"]) if status else None
        if (key == self.shown and now - self.shown_at < 5.0) or now - self.shown_at < 1.0:
            return
        self.shown, self.shown_at = key, now
        if status is None:
            self.say("waiting for a manager")
            return
        groups, total = status["groups"], self.config.training.steps
        bar = "#" * (30 * status["step"] // total)
        waits = f", waits for {status['submission_waits_for']}" if not status["live"] else ""
        self.say(
            f"[{bar:<30}] step {status['step']}/{total}  incarnation {status['incarnation']}  "
            f"generating {groups['generating']}  ready {groups['completed']}  trained {status['consumed']} groups, "
            f"saved {status['checkpoint']}{waits}"
        )

    # ------------------------------------------------------------------ killing

    @staticmethod
    def ripe(kill: Kill, status: dict[str, Any]) -> bool:
        """In the middle of a step, with finished rollouts that no checkpoint holds yet."""
        finished = status["groups"]["completed"] + status["groups"]["leased"]
        return (
            status["step"] >= kill.after
            and status["open_lease"] is not None
            and finished > 0
            and status["step"] > status["checkpoint"]
        )

    async def strike(self, kill: Kill) -> bool:
        """SIGKILL. False when the moment has passed."""
        status = await self.status()
        if not status or not self.ripe(kill, status):
            return False
        actors = await self._actors() if kill.everything else {}
        kill.live = int(status["live"])
        victims = {"flow": int(status["driver_place"].rpartition(":")[2]), **actors}
        for pid in victims.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        kill.done = True
        self.say(
            f"KILLED -9 in step {status['step'] + 1} (lease {status['open_lease']} open, {kill.live} rollouts live): "
            + ", ".join(victims)
        )
        return True

    async def _actors(self) -> dict[str, int]:
        from gpu.actors import find_actor
        from gpu.cluster import processes_of

        found: dict[str, int] = {}
        for name in processes_of(self.spec):
            with contextlib.suppress(ActorLost):
                found[name] = await find_actor(self.spec.namespace, self.spec.run, name).pid.remote()
        return found

    async def revive(self) -> None:
        """Press Retry when the UI shows the crash. A worker reports a crash twice, the second time when its crash hook
        has ended; that may undo a Retry pressed before, which is then pressed again."""
        for press in range(PRESSES):
            await self._wait_for("CRASHED")
            await asyncio.sleep(SETTLE_S)
            await self.retry()
            self.say("the flow run is Crashed; pressed Retry" + (" again" if press else ""))
            if await self._wait_for("RUNNING", "CRASHED") == "RUNNING":
                return
        raise ActorLost(
            f"the flow run did not start after {PRESSES} retries",
            expected="Retry to start it again",
            action=f"look at {self.stack.root / 'logs' / 'worker.log'}",
        )

    async def _wait_for(self, *wanted: str) -> str:
        while (state := await self.state()) not in wanted:
            self.stack.check()
            await asyncio.sleep(0.2)
        return state


def plan_kills(seed: int, steps: int) -> list[Kill]:
    """One kill of the flow process, one of everything, in an order and at steps the seed draws."""
    dice = random.Random(seed)
    first, second = dice.uniform(0.15, 0.4), dice.uniform(0.5, 0.8)
    everything = dice.random() < 0.5
    return [
        Kill(max(1, round(first * steps)), everything, dice.uniform(0.0, 0.05)),
        Kill(max(2, round(second * steps)), not everything, dice.uniform(0.0, 0.05)),
    ]


async def run_demo(config: RunConfig, stack: Stack, kills: list[Kill]) -> None:
    import ray

    from gpu.cluster import connect

    demo = Demo(config, config.spec(RUN), stack, kills)
    connect(stack.ray_address, demo.spec.namespace)
    try:
        await demo.start()
        await demo.watch()
        demo.say("the flow run is Completed")
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 only when everything the demo shows is true."""
    parser = argparse.ArgumentParser(prog="python -m flows.demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "tiny"])
    parser.add_argument("--seed", type=int, default=0, help="draws prompts, weights and the kill moments")
    parser.add_argument("--storage", default="file", choices=["file", "s3"], help="s3 starts a server of its own")
    parser.add_argument("--root", type=Path, default=Path(".tidegate"))
    parser.add_argument("--port", type=int, help="of the Prefect server; a free one by default")
    parsed = parser.parse_args(arguments)
    try:
        return _demo(parsed)
    except TidegateError as error:
        print(f"DEMO FAILED {error}", flush=True)
        return error.exit_code


def _demo(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    if parsed.port:
        free_port(parsed.port)
    root = (parsed.root / f"demo-{parsed.model}{'-s3' if parsed.storage == 's3' else ''}").absolute()
    cache = str((parsed.root / "models").absolute())
    if parsed.model == "smollm2":
        print("op=demo phase=model what=smollm2-135m (converted once)", flush=True)
        find(ModelSpec("smollm2-135m", 0, cache))
    config = demo_config(parsed.model, parsed.seed, str(root / "store"), cache)
    config.check()
    shutil.rmtree(root, ignore_errors=True)
    if parsed.storage == "file":
        return _run(parsed, config, root, began)
    end_politely()
    print(f"op=demo phase=storage what=s3; serve it again later: python -m flows.seaweed {root / 's3'}", flush=True)
    with running_seaweed(root / "s3") as (server, _), exported(server):
        return _run(parsed, demo_config(parsed.model, parsed.seed, server.url(RUN), cache), root, began)


def _run(parsed: argparse.Namespace, config: RunConfig, root: Path, began: float) -> int:
    kills = plan_kills(parsed.seed, config.training.steps)
    home = Path(__file__).parent.parent
    small = parsed.model == "tiny"
    with running_stack(
        root,
        home,
        lambda line: print(line, flush=True),
        cpus=4,
        port=parsed.port,
        object_store=(256 << 20) if small else (3 << 30),
    ) as stack:
        os.environ.update(stack.env)
        asyncio.run(run_demo(config, stack, kills))
    return _report(config, root, kills, began)


def _report(config: RunConfig, root: Path, kills: list[Kill], began: float) -> int:
    from tasks.report import reward_curve

    print("op=demo phase=verify", flush=True)
    store = open_store(config.storage.url)
    report = verify(store, RUN, lambda line: print(line, flush=True))
    history = committed_steps(store, RUN)
    (root / "reward.png").write_bytes(reward_curve(RUN, history))
    line, problems = judge(
        report, [step["reward_mean"] for step in history], [kill.done for kill in kills], config.storage.url
    )
    print(summary(report, time.monotonic() - began), flush=True)
    print(f"Reward curve: {root / 'reward.png'}", flush=True)
    print(f"Look further: tidegate inspect {RUN} --storage '{config.storage.url}'", flush=True)
    for problem in problems:
        print(f"PROBLEM {problem}", flush=True)
    print(f"DEMO {'FAILED' if problems else 'OK'} {line}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
