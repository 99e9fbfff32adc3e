"""Figures in a common style. Import these modules only when drawing, since they load matplotlib, which is slow."""
