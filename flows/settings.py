"""The Prefect and Ray settings a run needs, in one place. Each has a reason; see docs/settings.md.

They are environment variables of every process: server, worker, flow run, Ray.
"""

from __future__ import annotations

RAY = {
    # Bind to loopback only, whatever the machine's outer address is.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The monitor kills actors when a neighbour fills the machine; an actor that comes back empty is worse than none.
    "RAY_memory_monitor_refresh_ms": "0",
    # New clusters ask for a token, clients do not send one by themselves: say it in every process.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
PREFECT = {
    # The recorder's default batch of 1 keeps the server minutes behind a fast run: 21-31 task runs/s against ~165.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true",
    # A retry should start at once, not at the next of the worker's polls every 10 s.
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    # Zombies are found by missing heartbeats; 30 s is the shortest interval Prefect accepts.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Nothing leaves the machine.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
}


def environment() -> dict[str, str]:
    """All of them, for a child process."""
    return {**RAY, **PREFECT}
