"""The ranks of a job: how a process becomes one, their collective calls, and how they leave."""
