"""The collective benchmark: measures the compute speed of every rank and the bandwidth between every pair of ranks."""
