"""The Prefect and Ray settings a run needs, each with its reason, in one place; docs/settings.md is made from it.

They are environment variables of every process: server, worker, flow run, Ray.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    value: str
    reason: str


RAY = (
    Variable("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0", "Loopback only, whatever the outer address is"),
    Variable(
        "RAY_memory_monitor_refresh_ms",
        "0",
        "The monitor kills actors when a neighbour fills the machine; better an honest out-of-memory",
    ),
    Variable(
        "RAY_AUTH_MODE",
        "disabled",
        "New clusters ask for a token, clients send none by themselves: say it in every process (`token` off loopback)",
    ),
    Variable("RAY_USAGE_STATS_ENABLED", "0", "Nothing leaves the machine"),
    Variable("RAY_DEDUP_LOGS", "0", "Every line is kept"),
)
_BATCH = "The default of 1 leaves the server minutes behind a fast run: 21-31 task runs/s against about 165"
PREFECT = (
    Variable("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE", "200", _BATCH),
    Variable("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE", "200", _BATCH),
    Variable("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL", "1", "Seconds until the UI shows a task"),
    Variable("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE", "200", "As above, for events"),
    Variable("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE", "200", "As above, for events"),
    Variable("PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE", "100", "As above, for automations"),
    Variable("PREFECT_SERVER_LOG_RETRYABLE_ERRORS", "true", "Shows `database is locked`, which is hidden otherwise"),
    Variable("PREFECT_WORKER_QUERY_SECONDS", "2", "A retry starts at once, not at the next poll of 10 s"),
    Variable("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30", "Dead flow runs are found by it; the shortest Prefect accepts"),
    Variable(
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS",
        "180",
        "`tidegate train` without a server starts one; the first start creates its database, in more than 20 s",
    ),
    Variable("PREFECT_SERVER_ANALYTICS_ENABLED", "false", "Nothing leaves the machine"),
    Variable("PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS", "false", "Nothing leaves the machine"),
    Variable("PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT", "false", "No advertisement"),
    Variable("DO_NOT_TRACK", "1", "Nothing leaves the machine"),
    Variable("PREFECT_CLI_PROMPT", "false", "No question stops a script"),
)


def environment() -> dict[str, str]:
    """All of them, for a child process."""
    return {variable.name: variable.value for variable in (*RAY, *PREFECT)}


def apply() -> None:
    """Set them in this process, where the user has not; before Ray and Prefect are imported, which read some then."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
