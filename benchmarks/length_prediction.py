"""How well the length of an answer can be told from its prompt: real prompts, answered by the model itself.

1. Reads prompts from public data sets and lets the engine answer them (chat template, at most `--max-tokens` tokens).
   The lengths file gets a line per answer: source, token ids, text, output length, finish reason. What it already has
   is not generated again, so that a run can be stopped at any time and taken up later; `--minutes` stops it by itself.
2. Writes traffic logs of them, one as a server does, without text, and one with it, and trains a predictor from each
   with `headway train-predictor`.
3. Repeats the training with other prompts held out, `--splits` times, and prints the means and how they scatter.

    python benchmarks/length_prediction.py --data FOLDER --lengths lengths.jsonl --out FOLDER [--minutes 25]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from headway import LLM, SamplingParams
from headway.cli.main import main as headway
from headway.outputs import RequestOutput
from headway.predict import LearnedRanker, PromptView, TrafficLog, read_traffic
from headway_lab.predictor.train_command import compare
from headway_lab.predictor.training import split_records, train_ranker

Message = dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """What is asked: the last message is the user's."""

    key: str
    messages: list[Message]

    @property
    def source(self) -> str:
        return self.key.split("/")[0]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def gsm8k(folder: Path) -> Iterator[Conversation]:
    for row in rows(folder, "gsm8k_test_all.jsonl"):
        yield Conversation(f"gsm8k/{row['id']}", ask(row["question"]))


def ifeval(folder: Path) -> Iterator[Conversation]:
    for row in rows(folder, "ifeval_gpt4_541.jsonl"):
        yield Conversation(f"ifeval/{row['id']}", ask(row["prompt"]))


def specbench(folder: Path) -> Iterator[Conversation]:
    """The first turns of six tasks; MT-bench is one of them."""
    for row in rows(folder, "specbench_480.jsonl"):
        yield Conversation(f"specbench-{row['category']}/{row['question_id']}", ask(row["turns"][0]))


def mtbench101(folder: Path) -> Iterator[Conversation]:
    """Each conversation up to each of its user's turns."""
    for index, row in enumerate(rows(folder, "mtbench101_all.jsonl")):
        messages: list[Message] = []
        for turn, said in enumerate(row["history"]):
            messages = messages + ask(said["user"])
            yield Conversation(f"mtbench101-{row['task']}/{index}#{turn}", messages)
            messages = [*messages, {"role": "assistant", "content": said["bot"]}]


def oasst(folder: Path) -> Iterator[Conversation]:
    """Trees of replies: each path up to each of its user's turns."""
    for row in rows(folder, "oasst_en_100_tree.jsonl"):
        paths = [([], row["prompt"])]
        number = itertools.count()
        while paths:
            before, node = paths.pop()
            role = "user" if node["role"] == "prompter" else "assistant"
            messages = [*before, {"role": role, "content": node["text"]}]
            if role == "user":
                yield Conversation(f"oasst/{row['message_tree_id']}#{next(number)}", messages)
            paths += [(messages, reply) for reply in node.get("replies", [])]


def conversations(folder: Path, seed: int) -> list[Conversation]:
    """All of them, each question once, in an order drawn by the seed: a part of it is a fair sample of all."""
    found: dict[str, Conversation] = {}
    for source in (gsm8k(folder), ifeval(folder), specbench(folder), mtbench101(folder), oasst(folder)):
        for conversation in source:
            found.setdefault(json.dumps(conversation.messages), conversation)
    shuffled = list(found.values())
    random.Random(seed).shuffle(shuffled)
    return shuffled


def generate(options: argparse.Namespace) -> None:
    """Answer what the lengths file does not have yet, until all is done or time is up."""
    done = {row["key"] for row in read_lengths(options.lengths)}
    todo = [each for each in conversations(options.data, options.seed) if each.key not in done]
    todo = todo[: max(0, options.limit - len(done))]
    if not todo or options.minutes <= 0:
        return
    memory = {"kv_cache_memory": 24 * 2**30 if torch.cuda.is_available() else 2**31}
    max_model_len = options.max_prompt_tokens + options.max_tokens
    llm = LLM(options.model, max_model_len=max_model_len, max_num_seqs=options.max_num_seqs, **memory)
    started_s, num_done, num_tokens = time.monotonic(), 0, 0
    with options.lengths.open("a", encoding="utf-8") as file:
        for row in answers(llm, todo, options):
            file.write(json.dumps(row) + "\n")
            file.flush()
            num_done, num_tokens = num_done + 1, num_tokens + row["num_output_tokens"]
            if num_done % 100 == 0:
                rate = num_tokens / (time.monotonic() - started_s)
                print(f"{num_done:,} of {len(todo):,} answers, {rate:,.0f} tok/s", flush=True)
    llm.shutdown()


def answers(llm: LLM, todo: list[Conversation], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the lengths file, as the answers end."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    deadline_s = time.monotonic() + 60 * options.minutes
    waiting = iter(todo)
    running: dict[str, tuple[Conversation, str]] = {}
    while True:
        # When time is up, what runs is still finished: leaving it out would leave out the long answers.
        while len(running) < 3 * options.max_num_seqs // 2 and time.monotonic() < deadline_s:
            conversation = next(waiting, None)
            if conversation is None:
                break
            text = tokenizer.apply_chat_template(conversation.messages)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) <= options.max_prompt_tokens:
                llm.engine.add_request(conversation.key, token_ids, params, stream=False)
                running[conversation.key] = conversation, text
        if not running:
            return
        for output in llm.engine.step().outputs:
            yield length_row(output, *running.pop(output.request_id), options)


def length_row(
    output: RequestOutput, conversation: Conversation, text: str, options: argparse.Namespace
) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "key": conversation.key,
        "source": conversation.source,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": text,
        "arrival_s": None,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }


def read_lengths(path: Path) -> list[dict[str, Any]]:
    """What has been generated; a last line that was cut off is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def write_log(rows: list[dict[str, Any]], path: Path, *, with_text: bool) -> Path:
    path.unlink(missing_ok=True)
    with TrafficLog(path) as log:
        for row in rows:
            prompt = PromptView(
                row["prompt_token_ids"],
                max_tokens=row["max_tokens"],
                temperature=row["temperature"],
                text=row["text"] if with_text else None,
            )
            log.write(prompt, num_output_tokens=row["num_output_tokens"], finish_reason=row["finish_reason"])
    return path


def repeat(log: Path, num_splits: int) -> None:
    """Mean and standard deviation over splits of what `headway train-predictor` prints for one, as a table."""
    records = read_traffic([log]).records
    found: dict[str, list[tuple[float, ...]]] = {}
    objectives: dict[str, list[float]] = {}
    for seed in range(num_splits):
        train, held_out = split_records(records, 0.2, seed)
        trained = train_ranker(train, seed=seed)
        for name, tau in trained.tau_by_objective.items():
            objectives.setdefault(name, []).append(tau)
        for name, quality in compare(train, held_out, LearnedRanker(trained.model)).items():
            found.setdefault(name, []).append(astuple(quality))
    print(f"\n{log.name}: {len(records):,} requests, a fifth held out, {num_splits} times\n")
    print("| predictor | Kendall tau | pairs in order | mean abs. log error | predicted / true tokens |")
    print("|---|--:|--:|--:|--:|")
    for name, each in found.items():
        columns = [spread(column) for column in zip(*each, strict=True)]
        if name == "prompt length":  # orders answers, but is no guess of their lengths
            columns[2:] = ["–", "–"]
        print(f"| {name} | {' | '.join(columns)} |")
    print("\nfolds: " + ", ".join(f"{name} {spread(taus)}" for name, taus in objectives.items()))


def spread(values: Any) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder with the data sets.")
    parser.add_argument("--lengths", type=Path, required=True, help="What is generated, a line per answer.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for traffic logs and models.")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="Stop generating after so long; 0: generate nothing."
    )
    parser.add_argument("--limit", type=int, default=10**9, help="Most answers to have in all.")
    parser.add_argument("--model", help="Who answers: a folder or a file. Default: the embedded model.")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="Answers generated at a time.")
    parser.add_argument("--only-generate", action="store_true", help="Train nothing.")
    parser.add_argument("--splits", type=int, default=5, help="How often to hold out other prompts.")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-prompt-tokens", type=int, default=1500, help="Longer prompts are left out.")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    generate(options)
    if options.only_generate:
        return
    rows = read_lengths(options.lengths)
    for name, with_text in (("ids", False), ("text", True)):
        log = write_log(rows, options.out / f"traffic_{name}.jsonl", with_text=with_text)
        print(f"\n== headway train-predictor {log.name}", flush=True)
        if headway(["train-predictor", str(log), "-o", str(options.out / f"lengths_{name}.model")]) != 0:
            raise SystemExit(1)
        repeat(log, options.splits)


if __name__ == "__main__":
    main()
