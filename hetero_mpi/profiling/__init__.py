"""The collective benchmark: what every rank computes per second, and what every pair of ranks moves per second."""
