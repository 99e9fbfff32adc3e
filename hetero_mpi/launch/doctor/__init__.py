"""The command ``doctor``: checks whether the hosts can run a job, and how to fix failures."""
