"""A run from its start to its end: setup, the loop over steps, reconfiguration, recovery; rank 0 leads."""
