"""The command ``doctor``: checks whether the hosts can run a job, and explains how to fix problems."""
