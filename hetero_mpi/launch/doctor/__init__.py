"""The command ``doctor``: checks whether the hosts can run a job, and says how to mend what fails."""
