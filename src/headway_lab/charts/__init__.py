"""Plots as SVG and pages as single HTML files: nothing is loaded from anywhere, nothing has to be installed."""

from headway_lab.charts.bar_chart import bar_chart, cdf_chart, histogram_chart
from headway_lab.charts.heat_map import HeatGrid, HeatMap, heat_map
from headway_lab.charts.html_page import Badge, Link, Origin, Page, command_text
from headway_lab.charts.line_chart import Series, line_chart
from headway_lab.charts.terminal_plot import terminal_histogram, terminal_plot

__all__ = [
    "Badge",
    "Link",
    "HeatGrid",
    "HeatMap",
    "Origin",
    "Page",
    "Series",
    "bar_chart",
    "cdf_chart",
    "command_text",
    "heat_map",
    "histogram_chart",
    "line_chart",
    "terminal_histogram",
    "terminal_plot",
]
