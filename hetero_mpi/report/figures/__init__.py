"""Figures drawn by matplotlib in one style. Import these modules only to draw, as matplotlib loads slowly."""
