"""The command ``evaluate``: evaluates a finished model on datasets or on tasks of lm-evaluation-harness."""
