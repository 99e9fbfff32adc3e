"""One rank's part of a model: transformers' code, with other ranks' layers replaced by pass-through modules. No mpi4py imports."""
