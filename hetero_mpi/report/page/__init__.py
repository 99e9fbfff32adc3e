"""The run report: a self-contained HTML file with SVG figures; no script, no request."""
