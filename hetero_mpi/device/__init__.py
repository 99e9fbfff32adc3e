"""Devices: torch backends behind one small interface. The only room that knows one vendor from another."""
