"""A stage that a group of ranks holds, each a share of every layer: tensor parallelism with unequal shares."""
