"""Plots as SVG and pages as single HTML files: nothing is loaded from anywhere, nothing has to be installed."""
