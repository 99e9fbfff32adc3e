"""The life of one run on every rank: setup, the loop over steps, reconfiguration, recovery. Rank 0 coordinates."""
