"""What speculation brings: tokens per second with and without it, in turn, on two engines of one run.

    python benchmarks/speculation.py text --model M.gguf --gsm8k gsm8k_test_all.jsonl --specbench specbench_480.jsonl
    python benchmarks/speculation.py text --model LARGE.gguf --draft-model SMALL.gguf ...
    python benchmarks/speculation.py forced --model llama31-8b --acceptance 2.5 --batches 1 64 256 --nano

`text` has real answers: edits of code (functions of Python's own library, one name to be changed), summaries and sums.
All requests of a set are there at once, `--concurrency` of them run. `forced` has random weights and guesses that are
accepted at random (`--spec-synthetic-acceptance`): with 1 none is ever right, which is what asking costs.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import random
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.lab.bench.datasets import LengthRange, draw_work
from headway.lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway.lab.bench.replay import run_round
from headway.sampling_params import SamplingParams

FUNCTIONS: list[tuple[Callable[..., object], str, str]] = [
    (textwrap.dedent, "text", "source"),
    (heapq.merge, "h_append", "push"),
    (shlex.split, "lex", "lexer"),
    (statistics.median_grouped, "interval", "width"),
    (heapq.nsmallest, "result", "smallest"),
    (textwrap.indent, "prefix", "margin"),
    (inspect.cleandoc, "lines", "rows"),
    (statistics.linear_regression, "slope", "gradient"),
    (heapq._siftup, "childpos", "child"),
    (random.Random.sample, "selected", "chosen"),
    (inspect.getmro, "cls", "kind"),
    (textwrap.shorten, "width", "limit"),
    (random.Random.choices, "cum_weights", "totals"),
    (statistics.quantiles, "method", "way"),
    (shlex.join, "split_command", "words"),
    (heapq.nlargest, "result", "largest"),
]


def prompts_of(name: str, options: argparse.Namespace) -> list[str]:
    """Requests in the words of a user."""
    if name == "edits":
        return [
            f"Rename `{old}` to `{new}` in this function. Answer with the whole function and nothing else.\n\n"
            f"```python\n{textwrap.dedent(inspect.getsource(function))[:1800]}\n```"
            for function, old, new in FUNCTIONS
        ]
    if name == "summaries":
        rows = [json.loads(line) for line in Path(options.specbench).read_text().splitlines()]
        return [row["turns"][0][:2400] for row in rows if row["category"] == "summarization"]
    rows = [json.loads(line) for line in Path(options.gsm8k).read_text().splitlines()]
    return [row["question"] for row in rows]


def run_text(engine: LLMEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds between the first token of the last request to get one and the end, and all tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), list(prompt), params)
    tokens: dict[str, list[int]] = {}
    started_s, num_before = None, 0
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            tokens[output.request_id] = output.outputs[0].token_ids
        if started_s is None and len(tokens) == len(prompts):
            started_s, num_before = time.perf_counter(), sum(map(len, tokens.values()))
    assert started_s is not None
    num_made = sum(map(len, tokens.values())) - num_before
    return num_made / (time.perf_counter() - started_s), [tokens[str(number)] for number in range(len(prompts))]


def as_chat(engine: LLMEngine, words: str) -> list[int]:
    assert engine.tokenizer is not None
    chat = engine.tokenizer.apply_chat_template([{"role": "user", "content": words}])
    return engine.tokenizer.encode(chat, add_special_tokens=False)


def drafts_of(engine: LLMEngine) -> tuple[int, int]:
    speculation = engine.core.scheduler.speculation
    return (
        (0, 0) if speculation is None else (speculation.stats.num_draft_tokens, speculation.stats.num_accepted_tokens)
    )


def costs_of(engine: LLMEngine, num_rows: int) -> str:
    """What the controller goes by."""
    speculation = engine.core.scheduler.speculation
    if speculation is None:
        return ""
    cost, step_s = speculation._cost, engine.core.scheduler.pace.decode_s(num_rows)
    most = max(1, cost.most_tokens(num_rows) // 2)
    return f"  ({1e3 * step_s:.2f} ms a step, {most} guesses {1e3 * cost.added_s(num_rows, most):.2f} ms)"


def text(options: argparse.Namespace) -> None:
    common = {
        "model": options.model,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
        "num_threads": options.num_threads,
        "dtype": options.dtype,
    }
    mode = "draft" if options.draft_model else options.speculation
    engines = {
        "off": LLMEngine.from_config(EngineConfig.from_options(**common)),
        mode: LLMEngine.from_config(
            EngineConfig.from_options(speculation=mode, draft_model=options.draft_model, **common)
        ),
    }
    on = engines[mode]
    print(f"{'set':<12}{'at once':>8}{'off tok/s':>11}{'on tok/s':>11}{'ratio':>7}  {'guessed':>8}{'right':>7}  same")
    for kind in options.sets:
        texts = prompts_of(kind, options)
        for size in options.concurrency:
            ratios, speeds, same = [], [], True
            before = drafts_of(on)
            for round_number in range(options.rounds):
                start = round_number * size % len(texts)
                chosen = [*texts[start:], *texts[:start]][:size]
                prompts = [as_chat(on, one) for one in chosen]
                found = {name: run_text(engine, prompts, options.num_tokens) for name, engine in engines.items()}
                (off_speed, off_tokens), (on_speed, on_tokens) = found["off"], found[mode]
                speeds.append((off_speed, on_speed))
                ratios.append(on_speed / off_speed)
                same &= off_tokens == on_tokens
            guessed, right = (after - earlier for after, earlier in zip(drafts_of(on), before, strict=True))
            medians = [statistics.median(column) for column in zip(*speeds, strict=True)]
            print(
                f"{kind:<12}{size:>8}{medians[0]:>11.1f}{medians[1]:>11.1f}{statistics.median(ratios):>7.2f}"
                f"  {guessed:>8}{right:>7}  {same}",
                flush=True,
            )


def forced(options: argparse.Namespace) -> None:
    common = {
        "model": options.model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "kv_cache_memory": options.kv_cache_memory,
    }
    engines = {}
    for label, extra in (
        ("off", {}),
        *((("off again", {}),) if options.control else ()),
        *((f"{mean:g}", {"speculation": "ngram", "spec_synthetic_acceptance": mean}) for mean in options.acceptance),
        *((("ngram", {"speculation": "ngram"}),) if options.ngram else ()),
    ):
        engines[label] = LLMEngine.from_config(EngineConfig.from_options(**common, **extra))
        engines[label].warm_up()
    vocab_size = next(iter(engines.values())).model_config.vocab_size
    works = {
        f"b{size}": draw_work(
            random.Random(0),
            size,
            input_len=LengthRange.exactly(128),
            output_len=LengthRange.exactly(options.num_tokens),
            vocab_size=vocab_size,
        )
        for size in options.batches
    }
    if options.nano:
        works["nano"] = SCENARIOS["nano"].draw(0, vocab_size)
    print(f"{'work':<8}{'tokens a step':>14}{'tok/s':>11}{'ratio':>7}{'guessed':>9}{'right':>8}  rounds, s")
    for name, work in works.items():
        num_tokens = sum(request.num_output_tokens for request in work)
        times: dict[str, list[float]] = {label: [] for label in engines}
        before = {label: drafts_of(engine) for label, engine in engines.items()}
        for number in range(options.rounds + 1):  # the first one warms up
            for label, engine in engines.items():
                elapsed_s = run_round(engine, work, temperature=SCENARIO_TEMPERATURE).times.elapsed_s
                if number:
                    times[label].append(elapsed_s)
        for label, engine in engines.items():
            guessed, right = (after - earlier for after, earlier in zip(drafts_of(engine), before[label], strict=True))
            ratio = statistics.median(times["off"]) / statistics.median(times[label])
            rounds = " ".join(f"{seconds:.3f}" for seconds in times[label])
            speed, costs = num_tokens / statistics.median(times[label]), costs_of(engine, len(work))
            print(f"{name:<8}{label:>14}{speed:>11.1f}{ratio:>7.3f}{guessed:>9}{right:>8}  {rounds}{costs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    real = commands.add_parser("text")
    real.add_argument("--model")
    real.add_argument("--dtype", default="auto")
    real.add_argument("--speculation", default="ngram")
    real.add_argument("--draft-model", help="another model guesses, instead")
    real.add_argument("--gsm8k")
    real.add_argument("--specbench")
    real.add_argument("--sets", nargs="+", default=["edits", "summaries", "sums"])
    real.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    real.add_argument("--num-tokens", type=int, default=128)
    real.add_argument("--rounds", type=int, default=3)
    real.add_argument("--num-threads", type=int)
    real.set_defaults(run=text)
    dummy = commands.add_parser("forced")
    dummy.add_argument("--model", default="llama31-8b")
    dummy.add_argument("--acceptance", nargs="+", type=float, default=[2.5, 1.0])
    dummy.add_argument("--ngram", action="store_true", help="and guesses that are looked up, in random text")
    dummy.add_argument("--control", action="store_true", help="and a second engine that guesses nothing")
    dummy.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    dummy.add_argument("--num-tokens", type=int, default=256)
    dummy.add_argument("--nano", action="store_true")
    dummy.add_argument("--rounds", type=int, default=3)
    dummy.add_argument("--kv-cache-memory", type=int, default=20 * 2**30, help="bytes, of each engine")
    dummy.set_defaults(run=forced)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
