"""What structured output costs: tokens per second without, with one and with all requests under a schema, in one run.

    python benchmarks/structured_cost.py --num-requests 16
    python benchmarks/structured_cost.py --model llama31-8b --load-format dummy --tokenizer FILE --num-requests 64

Every request makes the same number of tokens: the schema is of a list that is not full before. Then the time to a first
token: plain, with a schema of 2 kB that was never seen, and with the same one again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.sampling_params import SamplingParams, StructuredOutputsParams

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["plain", "special", "other"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": ITEM, "minItems": 400}


def run_round(engine: LLMEngine, *, num: int, num_guided: int, num_tokens: int) -> float:
    """Output tokens per second."""
    plain = {"temperature": 0.8, "seed": 1, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
    guided = plain | {"structured_outputs": StructuredOutputsParams(json=ENDLESS)}
    vocab_size = engine.model_config.vocab_size
    for number in range(num):
        prompt = [(number * 7919 + place * 104729) % (vocab_size - 1000) + 500 for place in range(64)]
        engine.add_request(f"r{number}", prompt, SamplingParams(**(guided if number < num_guided else plain)))
    started_s, made = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            if output.finished:
                made += len(output.outputs[0].token_ids)
    assert made == num * num_tokens, f"{made} tokens of {num * num_tokens}: an answer has ended early"
    return made / (time.perf_counter() - started_s)


def schema_of_2kb(number: int) -> dict[str, object]:
    """A schema that has not been seen."""
    properties = {
        f"field_{number}_{place}": {"type": "string", "description": "what this field is for"} for place in range(20)
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def first_token_ms(engine: LLMEngine, params: SamplingParams, name: str) -> float:
    """From the request to its first token, alone."""
    started_s = time.perf_counter()
    engine.add_request(name, list(range(100, 164)), params)
    engine.step()
    elapsed_s = time.perf_counter() - started_s
    engine.abort(name)
    while engine.has_unfinished_requests():
        engine.step()
    return 1e3 * elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokenizer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    config = EngineConfig.from_options(
        model=options.model,
        load_format=options.load_format,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_config(config)
    engine.warm_up()
    engine.guides.prepare()
    num, tokens = options.num_requests, options.num_tokens
    modes = {"none": 0, "one": 1, "all": num}
    run_round(engine, num=num, num_guided=num, num_tokens=tokens)
    rates: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(options.rounds):  # in turn, so that a slow moment of the machine meets all of them
        for name, num_guided in modes.items():
            rates[name].append(run_round(engine, num=num, num_guided=num_guided, num_tokens=tokens))
    best = {name: max(found) for name, found in rates.items()}
    print(f"{num} requests of {tokens} tokens, best of {options.rounds} rounds")
    for name, found in rates.items():
        shown = ", ".join(f"{rate:,.1f}" for rate in found)
        print(f"  guided: {name:<5} {best[name]:>10,.1f} tok/s  {best[name] / best['none']:.3f}   ({shown})")

    plain = {"temperature": 0.0, "max_tokens": 4}
    times: dict[str, list[float]] = {"plain": [], "new": [], "again": []}
    for number in range(20):
        schema = json.dumps(schema_of_2kb(number))
        guided = SamplingParams(**plain, structured_outputs=StructuredOutputsParams(json=schema))
        for name, params in (("plain", SamplingParams(**plain)), ("new", guided), ("again", guided)):
            times[name].append(first_token_ms(engine, params, f"{name}{number}"))
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(f"first token, ms (median of 20), schema of {len(schema)} bytes")
    for name, median in medians.items():
        print(f"  {name:<6} {median:8.2f}   {median - medians['plain']:+.2f}")
    engine.shutdown()


if __name__ == "__main__":
    main()
