"""Torch devices behind one small interface. No other package contains code for specific vendors."""
