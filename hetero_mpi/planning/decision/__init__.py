"""The planning decision: run the searches, compare their plans, and explain the chosen plan."""
