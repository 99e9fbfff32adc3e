"""The ranks of a job: how a process becomes one, what they do together, and how they leave."""
