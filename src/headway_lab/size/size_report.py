"""The answer of `headway size` as text, JSON and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.price import price_text
from headway_lab.bench.online_metrics import OnlineMetrics, thin_note
from headway_lab.bench.pricing import Pricing, RunPrices
from headway_lab.charts import Page, Series, line_chart
from headway_lab.sim.sim_report import trust_notes
from headway_lab.size.accuracy import Accuracy
from headway_lab.size.improvements import Improvement
from headway_lab.size.rates import ROUTER
from headway_lab.size.sizing import Sizing, breaking_objective
from headway_lab.tune.tune_report import Table, flags_text

_PERCENTS = (50, 90, 99)
_NAMES = {"ttft": "time to first token", "itl": "time between tokens", "e2el": "end to end"}
_ORIGINS = {
    "calibrated": "as calibrated",
    "changed": "calibrated in other formats; the difference by data sheet",
    "data sheet": "by data sheet",
}


@dataclass(frozen=True)
class Answer:
    """Everything that is shown."""

    sizing: Sizing
    improvements: Sequence[Improvement]
    price_per_hour: float | None
    accuracy: Accuracy
    kind_of_work: str
    """The work in a few words."""
    promises: str
    """The promises as a sentence."""

    def prices(self, rate: float) -> RunPrices | None:
        """The prices of tokens at a load that all the devices serve together; `None` without a price."""
        if self.price_per_hour is None:
            return None
        metrics = self.sizing.trial.metrics
        hour_s = 3600.0
        each = hour_s * rate / max(metrics.num_completed, 1)
        share = None if metrics.prices is None else metrics.prices.pricing.prompt_share
        return Pricing(self.price_per_hour, self.sizing.num_devices, share).of(
            hour_s,
            num_input_tokens=round(each * metrics.num_input_tokens),
            num_output_tokens=round(each * metrics.num_output_tokens),
        )

    @property
    def fleet_price(self) -> float | None:
        """The price of all devices for an hour."""
        return None if self.price_per_hour is None else self.price_per_hour * self.sizing.num_devices


def serve_command(sizing: Sizing) -> str:
    """The command that starts the server."""
    replicas = {"replicas": sizing.num_replicas, "router": ROUTER} if sizing.num_replicas > 1 else {}
    deployment = sizing.deployment
    options = {**deployment.serve_flags, **deployment.simulated_options, **sizing.promised.changes, **replicas}
    flags = flags_text({name: value for name, value in options.items() if not isinstance(value, bool)})
    switches = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        for name, value in options.items()
        if isinstance(value, bool)
    ]
    return " ".join(["headway serve", deployment.target.model, *filter(None, [flags]), *switches])


def devices_text(sizing: Sizing) -> str:
    """The replicas and their devices as a phrase."""
    deployment, number = sizing.deployment, sizing.num_replicas
    each = deployment.num_devices
    replicas = f"{number:,} replica{'s' if number != 1 else ''}"
    devices = f"one {deployment.device_name}" if each == 1 else f"{each} × {deployment.device_name}"
    total = f", {sizing.num_devices:,} devices in all" if number > 1 and each > 1 else ""
    return f"{replicas}, {'each ' if number > 1 else ''}on {devices}{total} ({_ORIGINS[deployment.origin]})"


def percentile_table(metrics: OnlineMetrics) -> Table:
    rows = [[text, *(metrics.percentile_text(name, percent) for percent in _PERCENTS)] for name, text in _NAMES.items()]
    return ["milliseconds", *(f"P{percent}" for percent in _PERCENTS)], rows


def headroom_text(answer: Answer) -> str:
    sizing = answer.sizing
    text = f"Headroom: {sizing.headroom:.0%}, up to about {sizing.highest_rate:.3g} requests/s."
    found = breaking_objective(sizing)
    if found is not None:
        objective, value = found
        return f"{text} Beyond that {objective.key} breaks first, with {value:,.4g} of {objective.bound:g}."
    if sizing.highest.breaking is None:
        return f"{text} All promises hold up to the capacity; beyond it requests wait ever longer."
    return f"{text} Beyond that the classes' targets are missed."


def price_lines(answer: Answer) -> list[str]:
    sizing = answer.sizing
    if answer.price_per_hour is None or answer.fleet_price is None:
        hours = sizing.num_devices * 1e6 / 3600.0 / sizing.trial.metrics.total_tok_s
        return [
            f"Price: a million tokens, in and out together, take {hours:.3g} hours of a device at this load. "
            "--price-per-hour says what that costs."
        ]
    now, most = answer.prices(sizing.rate), answer.prices(sizing.highest_rate)
    assert now is not None and most is not None
    return [
        f"Price: {price_text(answer.fleet_price)} an hour. A million tokens, in / out / both: {_price_text(now)} "
        f"at this load, {_price_text(most)} with all of the headroom used.",
    ]


def _price_text(prices: RunPrices) -> str:
    tokens = prices.tokens
    return " / ".join(map(price_text, (tokens.input, tokens.output, tokens.blended)))


def improvement_table(answer: Answer) -> Table:
    """A row for each change, the largest gain first."""
    full = answer.prices(answer.sizing.highest_rate)
    titles = ["change", "requests/s a device", "load", *([] if full is None else ["price/M tokens"]), "give"]
    rows = []
    for one in answer.improvements:
        cells = [one.name, f"{one.device_rate:.3g}", f"{one.gain:.2f}×"]
        if full is not None:
            price = full.tokens.blended
            is_known = price is not None and one.gain and not one.is_other_device
            cells.append(price_text(price / one.gain) if is_known and price is not None else _at_most(one, answer))
        rows.append([*cells, flags_text(one.flags) or "–"])
    return titles, rows


def _at_most(one: Improvement, answer: Answer) -> str:
    """What an hour of another device may cost."""
    if answer.price_per_hour is None or not one.gain:
        return "–"
    return f"half at ≤ {price_text(one.most_price(answer.price_per_hour))}/h"


def halving_text(answer: Answer) -> str:
    """What halves the price, as a sentence."""
    halving = [one for one in answer.improvements if one.halves]
    if halving:
        return f"Halves the price of a token: {'; '.join(one.name for one in halving)}."
    own = [one for one in answer.improvements if not one.is_other_device]
    if not own:
        return "No change is known that could be simulated for this machine."
    best = own[0]
    if best.gain <= 1.0:
        return "No single change makes a token cheaper on this device."
    return f"No single change halves the price of a token; closest is {best.name}, with {best.gain:.2f} times the load."


def trust_lines(answer: Answer) -> list[str]:
    """How far to trust the answer."""
    sizing = answer.sizing
    lines = []
    if sizing.deployment.origin != "data sheet":
        lines += trust_notes(sizing.deployment.calibration)
    if sizing.deployment.origin != "calibrated" or any(one.origin != "calibrated" for one in answer.improvements):
        lines.append(answer.accuracy.note)
    if (sheet := sizing.deployment.target.sheet) is not None and sheet.note:
        lines.append(sheet.note)
    if sizing.num_replicas > sizing.num_simulated:
        lines.append(f"{sizing.num_simulated} replicas were simulated with their share of the load.")
    if sizing.num_replicas > 1:
        lines.append("More replicas are taken to be no worse than fewer.")
    return [*lines, *filter(None, [thin_note(sizing.trial.metrics.num_completed)])]


def text_report(answer: Answer) -> list[str]:
    """The lines before the tables."""
    sizing = answer.sizing
    return [
        f"{answer.kind_of_work} {answer.promises}",
        "",
        f"{devices_text(sizing)}.",
        f"Start with: {serve_command(sizing)}",
    ]


def answer_json(answer: Answer) -> dict[str, Any]:
    sizing, deployment = answer.sizing, answer.sizing.deployment
    now, most = answer.prices(sizing.rate), answer.prices(sizing.highest_rate)
    breaking = breaking_objective(sizing)
    return {
        "simulated": True,
        "model": deployment.target.model,
        "device": deployment.device_name,
        "origin": deployment.origin,
        "rate": sizing.rate,
        "promises": answer.promises,
        "replicas": sizing.num_replicas,
        "devices_per_replica": deployment.num_devices,
        "devices": sizing.num_devices,
        "command": serve_command(sizing),
        "options": dict(sizing.promised.changes),
        "predicted": dataclasses.replace(sizing.trial.metrics, prices=None).as_json(),
        "highest_rate": sizing.highest_rate,
        "headroom": sizing.headroom,
        "breaks_first": None if breaking is None else breaking[0].key,
        "price_an_hour": answer.fleet_price,
        "prices": None if now is None else now.as_json(),
        "prices_at_highest_rate": None if most is None else most.as_json(),
        "improvements": [
            {
                "change": one.name,
                "options": one.flags,
                "requests_per_device": one.device_rate,
                "gain": one.gain,
                "halves": one.halves,
                "is_other_device": one.is_other_device,
                "origin": one.origin,
            }
            for one in answer.improvements
        ],
        "accuracy": {
            "verified": deployment.calibration.verified,
            "fit_errors": [error.as_json() for error in deployment.calibration.cost.errors],
            "data_sheet": {
                "mean_step_error": answer.accuracy.mean_step_error,
                "largest_row_error": answer.accuracy.largest_row_error,
            },
        },
    }


def answer_page(answer: Answer) -> Page:
    """A page with the latencies by load and the changes."""
    sizing = answer.sizing
    page = Page(f"Size for {sizing.deployment.target.model}", f"{answer.kind_of_work} {answer.promises}")
    facts: dict[str, Any] = {
        "replicas": f"{sizing.num_replicas:,}",
        "devices": f"{sizing.num_devices:,} × {sizing.deployment.device_name}",
        "headroom": f"{sizing.headroom:.0%}",
    }
    if (full := answer.prices(sizing.rate)) is not None and answer.fleet_price is not None:
        facts |= {"price an hour": price_text(answer.fleet_price), "a million tokens": price_text(full.tokens.blended)}
    page.facts(facts)
    page.text(f"{devices_text(sizing)}.")
    page.code(serve_command(sizing))
    page.heading("What to expect")
    page.table(*percentile_table(sizing.trial.metrics))
    page.text(headroom_text(answer))
    page.chart(_load_chart(sizing), "Each point is a simulation. Above 1, a promise is broken.")
    page.heading("What would make tokens cheaper")
    page.text(halving_text(answer))
    page.table(*improvement_table(answer))
    page.heading("How far to trust it")
    for line in trust_lines(answer):
        page.text(line)
    return page


def _load_chart(sizing: Sizing) -> str:
    points = [(rate, trial.score.tail) for rate, trial in sizing.highest.trials]
    share = sizing.num_replicas / sizing.num_simulated
    return line_chart(
        "The largest promised latency by the load",
        x="requests/s, all replicas together",
        y="multiple of its bound",
        series=[Series("simulated", [rate * share for rate, _ in points], [tail for _, tail in points])],
        log_y=True,
        lines={"bound": 1.0},
        x_lines={"this load": sizing.rate},
    )


def described(metrics: OnlineMetrics, rate: float, title: str) -> str:
    """The work in a sentence."""
    number = max(metrics.num_completed, 1)
    return (
        f"{title}: {rate:g} requests/s, {metrics.num_input_tokens / number:,.0f} tokens in and "
        f"{metrics.num_output_tokens / number:,.0f} out in the mean."
    )
