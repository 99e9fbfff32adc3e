"""The command ``evaluate``: evaluate a finished model on datasets or on tasks of lm-evaluation-harness."""
