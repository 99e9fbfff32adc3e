"""The command ``evaluate``: how good a finished model is, on sets of data or on the tasks of lm-evaluation-harness."""
