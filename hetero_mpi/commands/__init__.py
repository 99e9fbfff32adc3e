"""The sub-commands that need no rank of their own, and ``profile``; each a module that ``cli`` and ``api`` call."""
