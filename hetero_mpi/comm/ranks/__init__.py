"""The ranks of a job: how processes join it, their collective calls, and how they exit."""
