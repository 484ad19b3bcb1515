"""One phase of a training step each, as Prefect tasks. A phase is idempotent against the manager and the journal."""
