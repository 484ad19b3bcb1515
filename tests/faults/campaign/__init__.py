"""Seeded campaigns of real faults against a real run: processes on Ray, SeaweedFS behind a proxy or local files."""
