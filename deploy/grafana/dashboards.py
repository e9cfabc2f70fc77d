"""Write Headway's two Grafana dashboards, deploy/grafana/dashboards/*.json.

    .venv/bin/python deploy/grafana/dashboards.py            # `make docs` does it, too
    .venv/bin/python deploy/grafana/dashboards.py --check    # exit with 1 if a file is stale

Panels are written with Grafana's own types (grafana-foundation-sdk, made from Grafana's schema), so the files fit it.
What the panels read is compared with /metrics in tests/unit/test_monitoring.py, and evaluated by
`python -m tests.monitoring panels`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import service_and_engine as content
from grafana_foundation_sdk.builders import common, dashboard, stat, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

_Built = TypeVar("_Built", stat.Panel, timeseries.Panel)

FOLDER = Path(__file__).with_name("dashboards")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
STAT_HEIGHT, CHART_HEIGHT = 4, 8
ROW_WIDTH = 24


@dataclass
class _Place:
    """Where the next panel goes: from left to right, and below when a line is full."""

    x: int = 0
    y: int = 0
    height: int = 0

    def take(self, width: int, height: int) -> GridPos:
        if self.x + width > ROW_WIDTH:
            self.new_line()
        place = GridPos(h=height, w=width, x=self.x, y=self.y)
        self.x, self.height = self.x + width, max(self.height, height)
        return place

    def new_line(self) -> None:
        self.x, self.y, self.height = 0, self.y + self.height, 0


def build(board: content.Board) -> str:
    """Return the dashboard as JSON."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["headway"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(_link())
    )
    for variable in _variables():
        built.with_variable(variable)
    place, ids = _Place(), itertools.count(1)
    for row in board.rows:
        place.new_line()
        built.with_row(dashboard.Row(row.title).id(next(ids)).grid_pos(place.take(ROW_WIDTH, 1)))
        place.new_line()
        for panel in row.panels:
            shown = _stat(panel, place) if isinstance(panel, content.Stat) else _chart(panel, place)
            built.with_panel(shown.id(next(ids)))
    return JSONEncoder(indent=2, ensure_ascii=False).encode(built.build()) + "\n"


def _link() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Headway").type(DashboardLinkType.DASHBOARDS).tags(["headway"])
    return link.include_vars(True).keep_time(True)


def _variables() -> Sequence[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    models = "label_values(headway:num_requests_running, model_name)"
    instances = 'label_values(headway:num_requests_running{model_name=~"$model"}, instance)'
    return (
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _query("model", "Model", models),
        _query("instance", "Server", instances),
    )


def _query(name: str, label: str, query: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*")


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    config = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE)
    return config.steps([Threshold(value=value, color=color) for value, color in steps])


def _framed(built: _Built, panel: content.Stat | content.Chart, place: GridPos) -> _Built:
    """Give a panel what every panel has."""
    return built.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit).grid_pos(place)


def _stat(panel: content.Stat, place: _Place) -> stat.Panel:
    built = (
        _framed(stat.Panel(), panel, place.take(panel.width, STAT_HEIGHT))
        .thresholds(_thresholds(panel.thresholds))
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .color_mode(kinds.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("–")
    )
    if panel.shows_name:
        built.text_mode(kinds.BigValueTextMode.NAME)
    return built.with_target(_target(panel.expression, panel.legend, "A"))


def _chart(panel: content.Chart, place: _Place) -> timeseries.Panel:
    built = (
        _framed(timeseries.Panel(), panel, place.take(panel.width, CHART_HEIGHT))
        .min(0)
        .line_width(1)
        .fill_opacity(30 if panel.stacked else 8)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    )
    if panel.maximum is not None:
        built.max(panel.maximum)
    if panel.stacked:
        built.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if panel.limit is not None:
        built.thresholds(_thresholds(((None, "transparent"), (panel.limit, "red"))))
        built.thresholds_style(common.GraphThresholdsStyleConfig().mode(kinds.GraphTresholdsStyleMode.DASHED))
    for number, (legend, expression) in enumerate(panel.targets.items()):
        built.with_target(_target(expression, legend, chr(ord("A") + number)))
    return built


def _target(expression: str, legend: str, ref_id: str) -> Dataquery:
    query = Dataquery().expr(expression).legend_format(legend).ref_id(ref_id).range()
    return query.datasource(SOURCE)


def files() -> dict[Path, str]:
    """The content of each file."""
    return {FOLDER / f"{board.uid}.json": build(board) for board in content.BOARDS}


def main() -> int:
    """Write the files; with `--check`, exit with 1 if one is not as it would be written."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"deploy/grafana/dashboards/{path.name} is stale: run 'make docs'", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
