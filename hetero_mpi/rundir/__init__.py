"""Files that a run writes as it progresses (logs, metrics, events), and the run directory."""
