"""What a run writes while it goes on: logs, metrics, events; and the directory that holds them."""
