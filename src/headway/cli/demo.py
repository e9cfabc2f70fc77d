"""`headway demo`: a dozen requests of very different lengths share one batch, and one can watch them do it.

The KV cache and the token budget are small on purpose, so that everything that makes a batch interesting happens within
seconds: requests wait, a long prompt is computed in chunks beside other requests' decodes, blocks fill up and free.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, Protocol

from headway.cli.batch_watch import BatchWatch, WatchedRequest
from headway.cli.chat import encode_chat
from headway.cli.demo_prompts import REQUESTS, DemoRequest
from headway.cli.flags import add_flags, chosen, engine_flags
from headway.config import EngineConfig
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.llm_engine import LLMEngine

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_chunk_tokens": 48,
    "num_kv_blocks": 112,
}
SHOWN_ANSWERS = ("capital", "python")
MAX_PACE_S = 60.0


class BatchView(Protocol):
    """Whoever draws: told of each arrival and each step."""

    def arrived(self, request: WatchedRequest) -> None: ...

    def stepped(self, watch: BatchWatch) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="Plain lines, as without a terminal.")
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="SECONDS", help="Shortest time of a step, to watch at leisure."
    )
    add_flags(parser, engine_flags(DEFAULTS))


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.pace <= MAX_PACE_S:
        raise ConfigError(f"--pace must be from 0 to {MAX_PACE_S:g} seconds, not {arguments.pace:g}.")
    config = demo_config(chosen(arguments, engine_flags()))

    from rich.console import Console

    from headway.cli.live_view import LiveView, PlainView
    from headway.cli.loading import load_engine, stderr_console

    console = Console(highlight=False)
    engine = load_engine(config, stderr_console())
    view_class = LiveView if console.is_terminal and not arguments.plain else PlainView
    with view_class(console, title(config)) as view:
        watch = run_demo(engine, view, pace_s=arguments.pace)
    show_results(watch, console)
    return 0


def demo_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's options: those given, over the demo's own. A memory size takes the place of the block count."""
    defaults = {**DEFAULTS, "num_kv_blocks": None} if "kv_cache_memory" in options else DEFAULTS
    return EngineConfig.from_options(**{**defaults, **options})


def title(config: EngineConfig) -> str:
    """The model, as the view's header names it."""
    from headway.loader.embedded import MODEL_NAME

    return (config.model.model or MODEL_NAME).rstrip("/").rsplit("/", 1)[-1]


def run_demo(engine: LLMEngine, view: BatchView, *, pace_s: float = 0.0) -> BatchWatch:
    """Run all requests to their end, each arriving before its step."""
    watch = BatchWatch(
        [WatchedRequest(request.name, request.max_tokens) for request in REQUESTS],
        token_budget=engine.config.scheduler.limits.max_num_batched_tokens,
    )
    expected = list(REQUESTS)
    while expected or engine.has_unfinished_requests():
        while expected and (watch.num_steps >= expected[0].arrival_step or not engine.has_unfinished_requests()):
            _arrive(engine, watch, view, expected.pop(0))
        step = engine.step()
        watch.stepped(step.report, step.outputs, _block_tables(engine), _cached_blocks(engine))
        view.stepped(watch)
        time.sleep(max(0.0, pace_s - step.report.duration_s))
    return watch


def _block_tables(engine: LLMEngine) -> dict[str, tuple[int, ...]]:
    kv_cache = engine.core.scheduler.kv_cache
    return {request_id: kv_cache.block_table(request_id) for request_id in kv_cache.requests_with_blocks}


def _cached_blocks(engine: LLMEngine) -> set[int]:
    cache = engine.core.scheduler.kv_cache.prefix_cache
    return {block.block_id for block in cache or () if block.is_idle}


def _arrive(engine: LLMEngine, watch: BatchWatch, view: BatchView, request: DemoRequest) -> None:
    token_ids = encode_chat(engine, [{"role": "user", "content": request.question}])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=request.max_tokens)
    engine.add_request(request.name, token_ids, params)
    watch.arrived(request.name, num_prompt_tokens=len(token_ids))
    view.arrived(watch.requests[request.name])


def show_results(watch: BatchWatch, console: Console) -> None:
    """The closing table and some of the answers."""
    from rich.text import Text

    from headway.cli.live_view import summary_table

    console.print()
    console.print(summary_table(watch.summary()))
    for request in REQUESTS:
        if request.name in SHOWN_ANSWERS:
            question = request.question.split("\n", 1)[0]
            answer = watch.requests[request.name].text.strip()
            console.print(Text.assemble("\n", (f"{request.name}: {question}", "bold"), f"\n{answer}"))
