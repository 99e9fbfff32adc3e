"""Analyses of a profile or plan: idle time, calibration, drift and replanning."""
