"""The run directory and the files that a run writes as it progresses: logs, metrics and events."""
