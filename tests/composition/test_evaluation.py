"""Evaluation on Ray, with a torch engine, across the death of the manager."""

from __future__ import annotations

from collections.abc import Callable

from storage import schema
from tests.composition.rig import GPU, Rig

pytestmark = GPU
SUITE = {"name": "words", "environment": "reverse", "options": {"letters": 2}, "tasks": 6, "samples": 2}


async def test_every_step_has_one_result_although_the_manager_dies_beside_an_evaluation(
    start: Callable[..., Rig],
) -> None:
    rig = start(evaluation={"every": 1, "deadline": 60.0, "end_deadline": 60.0, "suites": [SUITE]})
    await rig.drive()
    await rig.steps(1, 1)
    await rig.kill("manager")
    resumed = await rig.drive()
    assert (resumed.incarnation, resumed.step) == (2, 1)
    report = await rig.finish(2)
    found = rig.records(schema.EvaluationDone)
    assert [one.step for one in found] == [1, 2, 3, 4]
    assert report.evaluations == 4
    assert {(one.samples, one.failed, one.mixed) for one in found} == {(12, 0, False)}
    assert {one.digest for one in found} <= {record.digest for record in rig.records(schema.PolicyPublished)}
    await rig.close()
