"""A rank's share of a model: transformers' own code with foreign layers passed through. Never imports mpi4py."""
