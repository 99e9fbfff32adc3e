"""The run report: one HTML file that needs nothing else. Drawn by our own SVG; no script, no request."""
