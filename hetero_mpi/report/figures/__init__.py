"""Every picture of this program, drawn by matplotlib in one style. It loads slowly: import this only where something is drawn."""
