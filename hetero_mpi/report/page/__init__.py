"""The run report: one HTML file that needs nothing else. A template, and pictures in it as SVG; no script, no request."""
