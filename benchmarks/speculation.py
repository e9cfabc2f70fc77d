"""What speculation brings: tokens per second with and without it, in turn, on two engines of one run.

    python benchmarks/speculation.py text --model M.gguf --gsm8k gsm8k_test_all.jsonl --specbench specbench_480.jsonl
    python benchmarks/speculation.py text --model LARGE.gguf --draft-model SMALL.gguf ...
    python benchmarks/speculation.py forced --model llama31-8b --acceptance 2.5 --batches 1 64 256 --nano
    python benchmarks/speculation.py drafted --model llama31-8b --right 0.8 --batches 1 4 16 64
    python benchmarks/speculation.py online --model llama31-8b --trace azure_conv_first2000.csv --speedups 2.5 4.4

`text` has real answers: edits of code (functions of Python's own library, one name to be changed), summaries and sums.
All requests of a set are there at once, `--concurrency` of them run. `forced` has random weights and guesses that are
accepted at random (`--spec-synthetic-acceptance`): with 1 none is ever right, which is what asking costs. `online` has
random weights and answers that are scripted: two thirds of them are spans of their prompts, the rest is random; its
requests arrive as in a trace. `drafted` has scripted answers and a draft model with random weights that guesses what is
written as often as it is told to.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import random
import shlex
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.runner.cpu_sampling import CpuSampling
from headway.runner.sampler import Int64Array, PendingSample, SamplingKernels, Seat
from headway.sampling_params import SamplingParams
from headway_lab.bench.datasets import LengthRange, draw_work
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import replay, run_round

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
    cost, step_s = speculation._cost, speculation._cost.plain_s(num_rows)
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


class Script:
    """Makes engines answer as it is written, whatever their model says: at each place the token's logit is raised."""

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, device: str) -> None:
        self._tokens = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size

    def direct(self, engine: LLMEngine, *, guess_right: float = 0.0) -> None:
        """`guess_right`: how often a draft model, if there is one, guesses what is written."""
        runner = engine.core.executor._runner  # type: ignore[attr-defined]
        sampler, seat, sample = runner._sampler, runner._sampler.seat, runner._sampler.sample

        def scripted_seat(seats: Sequence[Seat]) -> None:
            for one in seats:
                lines = self._write(one.request.prompt_token_ids)
                self._tokens[one.row, : len(lines)] = torch.from_numpy(lines).to(self._tokens.device)
            seat(seats)

        def scripted_sample(logits: Tensor, rows: Int64Array, positions: Int64Array, *others: Any) -> PendingSample:
            wanted = self._at(sampler._kernels, rows, positions)
            logits[: len(rows)].scatter_(1, wanted, 1e4)
            return sample(logits, rows, positions, *others)

        sampler.seat, sampler.sample = scripted_seat, scripted_sample
        if runner._drafter is not None:
            drafter, guess = runner._drafter._sampler, runner._drafter._sampler.guess

            def scripted_guess(logits: Tensor, rows: Int64Array, positions: Int64Array, num_before: int) -> None:
                wanted = self._at(drafter._kernels, rows, positions)
                is_right = torch.rand(wanted.shape, device=wanted.device) < guess_right
                logits[: len(rows)].scatter_(1, wanted, torch.where(is_right, 1e4, -1e4).to(logits.dtype))
                guess(logits, rows, positions, num_before)

            drafter.guess = scripted_guess

    def _at(self, kernels: SamplingKernels, rows: Int64Array, positions: Int64Array) -> Tensor:
        """[lines, 1]: what is written there."""
        if isinstance(kernels, CpuSampling):
            row_ids, places = torch.from_numpy(rows), torch.from_numpy(positions)
        else:  # the host may not know the places
            row_ids = kernels._sample_rows[: len(rows)].long()  # type: ignore[attr-defined]
            places = kernels._sample_positions[: len(rows)].long()  # type: ignore[attr-defined]
        return self._tokens[row_ids, places.clamp(max=self._tokens.shape[1] - 1)][:, None]

    def _write(self, prompt: Sequence[int]) -> NDArray[np.int64]:
        """The prompt, and an answer of spans of it and random tokens; the same for the same prompt."""
        rng, parts = np.random.default_rng([len(prompt), *prompt[:8]]), [np.asarray(prompt, dtype=np.int64)]
        num_left = self._tokens.shape[1] - len(prompt)
        while num_left > 0:
            start = int(rng.integers(len(prompt)))
            copied = parts[0][start : start + int(rng.integers(16, 65))]
            parts += [copied, rng.integers(self._vocab_size, size=int(rng.integers(8, 33)))]
            num_left -= len(parts[-1]) + len(parts[-2])
        return np.concatenate(parts)[: self._tokens.shape[1]]


DRAFT_SHAPE = {  # of Llama 3.2 1B, whose vocabulary is that of Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def drafted(options: argparse.Namespace) -> None:
    common = {
        "model": options.model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "kv_cache_memory": options.kv_cache_memory,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(DRAFT_SHAPE, file)
        file.flush()
        engines = {
            "off": LLMEngine.from_config(EngineConfig.from_options(**common)),
            "draft": LLMEngine.from_config(
                EngineConfig.from_options(speculation="draft", draft_model=file.name, **common)
            ),
        }
    for engine in engines.values():
        engine.warm_up()
        vocab_size = engine.model_config.vocab_size
        script = Script(engine.config.scheduler.max_num_seqs, 2048, vocab_size, engine.config.device.kind)
        script.direct(engine, guess_right=options.right)
    print(f"{'at once':<8}{'off tok/s':>11}{'draft tok/s':>12}{'ratio':>7}{'guessed':>9}{'right':>8}")
    for size in options.batches:
        lengths = {"input_len": LengthRange.exactly(128), "output_len": LengthRange.exactly(options.num_tokens)}
        work = draw_work(random.Random(0), size, vocab_size=vocab_size, **lengths)
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        before = drafts_of(engines["draft"])
        for number in range(options.rounds + 1):  # the first one warms up
            for mode, engine in engines.items():
                elapsed_s = run_round(engine, work, temperature=SCENARIO_TEMPERATURE).times.elapsed_s
                if number:
                    times[mode].append(elapsed_s)
        guessed, right = (after - earlier for after, earlier in zip(drafts_of(engines["draft"]), before, strict=True))
        off_s, draft_s = (statistics.median(times[mode]) for mode in engines)
        num_tokens = size * options.num_tokens
        print(
            f"{size:<8}{num_tokens / off_s:>11.1f}{num_tokens / draft_s:>12.1f}{off_s / draft_s:>7.3f}"
            f"{guessed:>9}{right:>8}{costs_of(engines['draft'], size)}",
            flush=True,
        )


def online(options: argparse.Namespace) -> None:
    scenario = SCENARIOS["online"]
    engines = {}
    for mode in ("off", "auto"):
        engine = engines[mode] = LLMEngine.from_config(
            EngineConfig.from_options(
                model=options.model,
                load_format="dummy",
                dtype=options.dtype,
                max_model_len=scenario.max_model_len,
                enable_prefix_caching=False,
                kv_cache_memory=options.kv_cache_memory,
                speculation=mode,
            )
        )
        engine.warm_up()
        vocab_size = engine.model_config.vocab_size
        Script(
            engine.config.scheduler.max_num_seqs, scenario.max_model_len, vocab_size, engine.config.device.kind
        ).direct(engine)
    print(f"{'speed':<7}{'mode':<6}{'TTFT P50/P90/P99':>22}{'TPOT':>22}{'ITL':>22}{'tok/s':>9}  guessed  right")
    for speedup in options.speedups:
        for number in range(options.rounds):
            work = scenario.draw(number, vocab_size, trace=options.trace, speedup=speedup)[: options.num_requests]
            for mode, engine in engines.items():
                before = drafts_of(engine)
                if not number:
                    replay(engine, work[:60], temperature=SCENARIO_TEMPERATURE)
                result = replay(engine, work, temperature=SCENARIO_TEMPERATURE)
                metrics = OnlineMetrics.of(result.timelines, result.duration_s)
                guessed, right = (after - earlier for after, earlier in zip(drafts_of(engine), before, strict=True))
                columns = [
                    "/".join(f"{metrics.latencies[name].percentiles[p]:.1f}" for p in (50, 90, 99))
                    for name in ("ttft", "tpot", "itl")
                ]
                print(
                    f"{speedup:<7}{mode:<6}{columns[0]:>22}{columns[1]:>22}{columns[2]:>22}"
                    f"{metrics.output_tok_s:>9,.0f}  {guessed:>7}{right:>7}",
                    flush=True,
                )


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
    draft = commands.add_parser("drafted")
    draft.add_argument("--model", default="llama31-8b")
    draft.add_argument("--right", type=float, default=0.8)
    draft.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    draft.add_argument("--num-tokens", type=int, default=256)
    draft.add_argument("--rounds", type=int, default=3)
    draft.add_argument("--kv-cache-memory", type=int, default=20 * 2**30, help="bytes, of each engine")
    draft.set_defaults(run=drafted)
    trace = commands.add_parser("online")
    trace.add_argument("--model", default="llama31-8b")
    trace.add_argument("--dtype", default="bfloat16")
    trace.add_argument("--trace", required=True, help="a CSV file with arrival_s, input_tokens, output_tokens")
    trace.add_argument("--speedups", nargs="+", type=float, default=[2.5, 4.4])
    trace.add_argument("--num-requests", type=int, default=1000)
    trace.add_argument("--rounds", type=int, default=1)
    trace.add_argument("--kv-cache-memory", type=int, default=40 * 2**30, help="bytes, of each engine")
    trace.set_defaults(run=online)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
