"""The run report: a self-contained HTML file with SVG figures that needs no scripts and makes no requests."""
