"""A lower bound on every plan's step time that knows links, sums, filling, memory, whole blocks and whole sequences."""
