"""The figures, drawn by matplotlib in one style. matplotlib loads slowly: import this only where something is drawn."""
