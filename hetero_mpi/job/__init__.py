"""The job file: its keys, the rules between them, and its conversion to a plan request."""
