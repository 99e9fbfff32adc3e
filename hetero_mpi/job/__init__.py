"""The job file: its keys, rules between them, and what planning asks of it."""
