"""A GPU made of host memory: what a first run on a real one would break breaks here (``device.cpp`` says what it is)."""

THROUGH = ("-m", "tests.stand_in_gpu")
"""Arguments of Python before a program, or a command of hetero_mpi, that is to have it."""
COUNTERS = "stand-in GPU: "
"""How the line of JSON begins that a process prints at its end."""
