"""What an operator scrapes: rollout control's figures on Ray's own endpoint."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Any

import pytest
import ray

from flows.stack import free_port
from gpu import metrics
from gpu.metrics import Gauges, gauge_name
from tests import servers

START_S = 120.0
"""Ray's agent imports half of Ray before it answers: 5 to 20 s on a quiet machine."""


@pytest.mark.parametrize(
    ("figure", "name"),
    [("groups_leased", "tidegate_groups_leased"), ("requeued_by-me_total", "tidegate_requeued_by_me_total")],
)
def test_names_are_what_prometheus_allows(figure: str, name: str) -> None:
    assert gauge_name(figure) == name


async def test_a_round_that_fails_costs_its_figures_and_not_the_next_rounds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published: list[dict[str, float]] = []
    monkeypatch.setattr(metrics, "EVERY_S", 0.0)
    monkeypatch.setattr(metrics.Gauges, "publish", lambda gauges, figures: published.append(figures))
    rounds = [{"a": 1.0}, RuntimeError("no figures"), {"a": 3.0}]

    async def ask() -> dict[str, float]:
        if not rounds:
            raise asyncio.CancelledError
        if isinstance(found := rounds.pop(0), Exception):
            raise found
        return found

    with pytest.raises(asyncio.CancelledError):
        await metrics.publish_for_ever("r1", ask)
    assert published == [{"a": 1.0}, {"a": 3.0}]
    assert "no figures" in caplog.text


def test_figures_reach_rays_metrics_endpoint_with_their_run_and_part() -> None:
    port = free_port()
    with servers.ray_instance(num_cpus=1, object_store_memory=80 << 20, _metrics_export_port=port):

        @ray.remote(num_cpus=0)
        class Publisher:
            def publish(self) -> None:
                self.gauges: Any = Gauges("r1")
                self.gauges.publish(
                    {"groups_leased": 3.0, "staleness_consumed/1": 7.0, "wait_s_total/trainer.batch": 2}
                )

        publisher = Publisher.remote()
        ray.get(publisher.publish.remote())
        deadline, page = time.monotonic() + START_S, ""
        while "tidegate_groups_leased" not in page:
            assert time.monotonic() < deadline, f"nothing of ours in {len(page)} bytes"
            time.sleep(0.5)
            page = _scrape(port)
    lines = [line for line in page.splitlines() if "tidegate_" in line and not line.startswith("#")]
    assert any("groups_leased" in line and 'run="r1"' in line and line.endswith(" 3.0") for line in lines)
    assert any("staleness_consumed" in line and 'part="1"' in line for line in lines)
    assert any("wait_s_total" in line and 'part="trainer.batch"' in line for line in lines)


def _scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as reply:
            return reply.read().decode()
    except OSError:
        return ""  # the endpoint is not up yet
