"""Interoperability: reading other trainers' configs, accepting their arguments, and exporting to other programs' formats."""
