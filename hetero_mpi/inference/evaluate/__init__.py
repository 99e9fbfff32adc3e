"""The command ``evaluate``: evaluate a finished model on data sets or on tasks of lm-evaluation-harness."""
