"""A GPU made of host memory: what a first run on a real one would break breaks here (``device.cpp`` says what it is)."""
