"""The files that a run writes while it goes on (logs, metrics, events), and its directory."""
