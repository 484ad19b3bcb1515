"""What happens to a run, drawn from its seed: which fault, to whom, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.faults.proxy import Fault

PROCESSES = ("driver", "manager", "trainer", "engine", "worker")
REQUESTS = (Fault.LOST_REPLY, Fault.DELAYED, Fault.SLOW_DOWN, Fault.TIMEOUT, Fault.DROPPED, Fault.ERROR, Fault.EXPIRED,
            Fault.CONFLICT, Fault.FULL, Fault.BIT_FLIP, Fault.TRUNCATED)  # fmt: skip
WEIGHTS = {"local": (5, 3, 3, 1), "s3": (3, 1, 10, 1)}
"""How often: kill, stop, store, alter. A network has more ways to fail than a disk."""
WHERE = ("/journal/", "/objects/", "/checkpoints/", "")


@dataclass(frozen=True, slots=True)
class Event:
    """At step `step` plus `delay_s`: `what` (kill, stop, request, server-kill, server-stop, full, alter) happens to
    `whom`. `seconds` is how long a stop or a full disk lasts, `times` how many requests meet a fault, `part` the draw
    that picks among several."""

    step: int
    delay_s: float
    what: str
    whom: str
    seconds: float = 0.0
    times: int = 1
    part: float = 0.0

    @property
    def kind(self) -> str:
        return f"{self.what} {self.whom}".strip()


@dataclass
class Plan:
    seed: int
    place: str
    events: list[Event] = field(default_factory=list)


def draw(seed: int, place: str, num_steps: int, count: int) -> Plan:
    """`count` events over a run of `num_steps` steps, in order of their steps."""
    dice = random.Random(f"{place}-{seed}")
    steps = sorted(dice.sample(range(1, num_steps - 3), count))
    return Plan(seed, place, [_event(dice, place, step) for step in steps])


def _event(dice: random.Random, place: str, step: int) -> Event:
    delay, part = dice.uniform(0.0, 0.15), dice.random()
    what = dice.choices(("kill", "stop", "store", "alter"), WEIGHTS[place])[0]
    if what == "kill":
        return Event(step, delay, "kill", dice.choice((*PROCESSES, "everything")), part=part)
    if what == "stop":
        whom = dice.choice(PROCESSES)
        longest = 9.0 if whom in ("driver", "manager", "trainer") else 2.0
        return Event(step, delay, "stop", whom, seconds=dice.uniform(0.3, longest), part=part)
    if what == "alter":
        how = dice.choice(("flip", "truncate", "remove"))
        return Event(step, delay, "alter", f"{dice.choice(('journal', 'checkpoint'))} {how}", part=part)
    if place == "local":
        return Event(step, delay, "full", "disk", seconds=dice.uniform(0.3, 2.0))
    if dice.random() < 0.12:
        return Event(step, delay, dice.choice(("server-kill", "server-stop")), "", seconds=dice.uniform(0.5, 3.0))
    fault, where = dice.choice(REQUESTS), dice.choice(WHERE)
    return Event(step, delay, "request", f"{fault.value}|{where}", dice.uniform(0.2, 2.0), dice.randint(1, 4), part)
