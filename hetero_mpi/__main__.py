"""Entry point of ``python -m hetero_mpi``."""

import sys

from hetero_mpi.cli import main

if __name__ == "__main__":
    sys.exit(main())
