"""`headway claims`: measures published claims about serving again, each by its name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.console.flags import add_flags, engine_flags
from headway.console.output_files import check_writable, write_json, write_text
from headway.errors import ConfigError
from headway.progress import progress_bar
from headway_lab.bench.pricing import add_price_flag
from headway_lab.sim.sim_flags import engine_options, load_calibration

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway_lab.claims.claim_results import Results, Row


_SHAPE_MAX_MODEL_LEN = 8192
_ON = ("auto", "engine", "simulator", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="Claims to measure. Default: all of them.")
    parser.add_argument("--list", action="store_true", help="Show the claims and end.")
    parser.add_argument(
        "--quick", action="store_true", help="Small numbers: all claims in some minutes on two cores, without data."
    )
    parser.add_argument(
        "--on",
        choices=_ON,
        default="auto",
        help="Where: the engine, the simulator, the engine where that is feasible and else the simulator (auto), or as "
        "auto and beside it in the simulator (both). (default: %(default)s)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="The simulated machine: what 'headway calibrate' wrote, or the name of one that is shipped. Default: "
        "h200-llama31-8b, an H200 with Llama 3.1 8B.",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="Write claims.md, claims.json and claims.html here; other rows there stay."
    )
    parser.add_argument("--data-dir", metavar="DIR", help="Real data, used instead of stand-ins where it is there.")
    add_price_flag(parser, more=" Of each run of a claim.")
    parser.add_argument("--note", metavar="TEXT", help="Stands above the table that is written.")
    parser.add_argument(
        "--table",
        action="append",
        metavar="DIR",
        help="Measure nothing: print the table of the thirty published numbers, from results that --output has written "
        "to DIR. May be given several times.",
    )
    parser.add_argument("--html", metavar="FILE", help="With --table: also write the page of these results.")
    add_flags(parser, engine_flags())


def run(arguments: argparse.Namespace) -> int:
    from headway_lab.claims.scenarios import find_claims

    claims = find_claims(arguments.names)
    if arguments.list:
        for claim in claims:
            print(f"{claim.id:<20}{claim.title}\n{'':20}{claim.published}\n{'':20}{claim.source}")
        return 0
    if arguments.table or arguments.html:
        return _show_kept(arguments)
    from headway_lab.claims.claim_results import Results, Session, measure_all

    options = engine_options(arguments)
    EngineConfig.from_options(**_defaults(options))
    if arguments.calibration is not None:
        load_calibration(arguments.calibration)
    folder = _folder(arguments.output)
    results = Results() if folder is None else Results.load(folder)
    if arguments.note is not None:
        results.note = arguments.note
    session = Session(
        load=lambda **more: _load({**_defaults(options), **more}),
        model_name=_name(options.get("model") or "embedded SmolLM2-135M"),
        has_gpu=_has_gpu(options),
        calibration=arguments.calibration,
        is_quick=arguments.quick,
        on=arguments.on,
        data_dir=None if arguments.data_dir is None else Path(arguments.data_dir).expanduser(),
        flags=_flags(arguments),
        price_per_hour=arguments.price_per_hour,
        bar=progress_bar,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )

    kept: list[Row] = []

    def keep(row: Row) -> None:
        _show(row)
        kept.append(row)
        results.put(row)
        if folder is not None:
            _write(folder, results)

    measure_all(session, claims, keep)
    if not kept:
        raise ConfigError("None of these claims could be measured there; the reasons stand above.")
    _sum_up(results.rows, [claim.id for claim in claims])
    if folder is not None:
        print(f"Wrote claims.md, claims.json and claims.html in {folder}", file=sys.stderr)
    return 0


def _show_kept(arguments: argparse.Namespace) -> int:
    """Print the table of the thirty published numbers, and write the page, from kept results."""
    from headway_lab.claims.claim_results import Results
    from headway_lab.claims.claims_page import claims_page
    from headway_lab.claims.numbers_table import best_rows, numbers_markdown

    if not arguments.table:
        raise ConfigError("--html goes with --table DIR, which says whose results; --output writes a page beside them.")
    if arguments.names or arguments.output:
        raise ConfigError("--table measures nothing: leave out --output and the names of claims.")
    kept = [Results.load(Path(folder).expanduser()) for folder in arguments.table]
    for folder, results in zip(arguments.table, kept, strict=True):
        if not results.rows:
            raise ConfigError(f"There are no results in '{folder}': 'headway claims --output {folder}' writes some.")
    rows = best_rows(kept)
    if arguments.html:
        check_writable(arguments.html)
        write_text(arguments.html, claims_page(rows, "\n\n".join(one.note for one in kept if one.note)).render())
    print(numbers_markdown(rows), end="")
    return 0


def _show(row: Row) -> None:
    """Print the table's columns below each other, since a terminal is too narrow for them side by side."""
    from headway_lab.claims.claim_results import HEADERS, claim_cells

    for title, cell in zip(HEADERS, claim_cells([row]), strict=True):
        print(f"{title + ':':<26}{cell}" if title != HEADERS[-1] else f"{title}:\n  {cell}")
    for label, prices in row.prices.items():
        print(f"{f'price, {label}:':<26}{', '.join(f'{title} {price:.4g}' for title, price in prices.items())}")
    print(f"{'measured on:':<26}{row.place}; {row.took_s:.0f} s\n", flush=True)


def _sum_up(rows: list[Row], names: list[str]) -> None:
    """Print one line for each claim, if there were several."""
    if len(names) < 2:
        return
    for row in rows:
        if row.claim.id in names:
            number = f"{row.outcome.value:.3g} {row.outcome.unit}"
            print(f"{row.claim.id:<20}{number:<36}{row.outcome.where}")


def _write(folder: Path, results: Results) -> None:
    """Write the results after each claim, so that no result is lost if a later claim fails."""
    from headway_lab.claims.claim_results import JSON_NAME, as_markdown
    from headway_lab.claims.claims_page import claims_page

    write_json(folder / JSON_NAME, results.as_json())
    write_text(folder / "claims.md", as_markdown(results))
    write_text(folder / "claims.html", claims_page(results.rows, results.note).render())


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    folder = Path(text).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write to '{text}': {error.strerror}.") from error
    return folder


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Default options: a built-in shape allows contexts much longer than any claim has."""
    from headway.loader.builtin_shapes import BUILTIN_SHAPES

    return {"max_model_len": _SHAPE_MAX_MODEL_LEN, **options} if options.get("model") in BUILTIN_SHAPES else options


def _load(options: dict[str, Any]) -> LLMEngine:
    from headway.console.loading import load_engine, stderr_console

    return load_engine(EngineConfig.from_options(**options), stderr_console(), quiet=True, warm=True)


def _flags(arguments: argparse.Namespace) -> str:
    """The flags that were given besides the claims, to run the same again; files by their names only."""
    given = {spec.flag: getattr(arguments, spec.name) for spec in engine_flags() if hasattr(arguments, spec.name)}
    if arguments.calibration is not None:
        given["--calibration"] = Path(arguments.calibration).name
    if arguments.data_dir is not None:
        given["--data-dir"] = "DATA"
    if arguments.price_per_hour is not None:
        given["--price-per-hour"] = f"{arguments.price_per_hour:g}"
    return " ".join(f"{flag} {_name(str(value))}" for flag, value in given.items())


def _name(text: str) -> str:
    """The last part of a file's or folder's name; any other text as it is."""
    return Path(text).name if Path(text).exists() else text


def _has_gpu(options: dict[str, Any]) -> bool:
    from headway.worker.formats import choose_device

    return choose_device(options.get("device", "auto")).type == "cuda"
