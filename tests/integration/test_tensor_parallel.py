"""A model over several ranks answers with the tokens of one: every family, every stored format, every kind of request;
and a rank that dies takes the engine with it, by name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, AsyncLLM, SamplingParams, native
from headway.errors import ConfigError, EngineDeadError
from headway.executor import rank_peers
from headway.executor.ranks import RanksExecutor
from headway.front.placement import EngineSpec, divide
from headway.front.replica import Replica
from headway.layers.collectives import Collectives, Meeting, SharedMemoryCollectives, ThreadCollectives
from headway.layers.quantized_weight import QuantizedWeight, dequantised, quantise
from headway.loader import open_checkpoint
from headway.models.decoder_config import Shard
from tests.integration.every_kind import answers
from tests.integration.test_resumption import PARAMS as KINDS
from tests.integration.test_resumption import answers as streamed
from tests.unit.front.served import until
from tests.unit.loader.test_quantized_weights import FORMATS, GGUF_TYPES, write, write_gguf
from tests.unit.models.tiny import FAMILIES, hf_model, random_prompt, save_folder

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 64}
TIGHT: dict[str, Any] = {**SMALL, "num_kv_blocks": 14, "block_size": 4, "max_num_batched_tokens": 9}
PROMPTS = [random_prompt(length, seed=length) for length in (3, 17, 9, 30)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.8, seed=4, max_tokens=14, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.0, max_tokens=14, repetition_penalty=1.2, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=1.0, seed=9, top_p=0.9, max_tokens=9, n=2, ignore_eos=True, detokenize=False),
]


def tokens(model: str, *, num_rounds: int = 1, num_requests: int = len(PROMPTS), **options: Any) -> list[list[int]]:
    """From the second round on, prefixes are found; on a GPU, graphs are replayed."""
    llm, found = LLM(model, **options), []
    try:
        for _ in range(num_rounds):
            for output in llm.generate(PROMPTS[:num_requests], PARAMS[:num_requests], use_tqdm=False):
                found += [list(one.token_ids) for one in output.outputs]
        llm.engine.check_invariants()
        return found
    finally:
        llm.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """4 heads over 1 or 2 key heads: with 4 ranks, key heads are on several of them."""
    folder = str(save_folder(hf_model(family), tmp_path))
    expected = tokens(folder, **SMALL)
    for size in (2, 4):
        for options in (SMALL, TIGHT):
            assert tokens(folder, tensor_parallel_size=size, collectives="threads", **options) == expected


def test_shares_of_different_size(tmp_path: Path) -> None:
    """5 key heads, 90 columns and 97 tokens over 2, 3 and 4 ranks."""
    shape = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8, "intermediate_size": 90}
    folder = str(save_folder(hf_model("qwen3", **shape, vocab_size=97, tie_word_embeddings=False), tmp_path))
    expected = tokens(folder, **SMALL)
    for size in (2, 3, 4):
        assert tokens(folder, tensor_parallel_size=size, collectives="threads", **SMALL) == expected


@pytest.mark.parametrize("name", [*FORMATS, *GGUF_TYPES])
@pytest.mark.parametrize("quantization", ["none", "stored"])
def test_every_stored_format(name: str, quantization: str, tmp_path: Path) -> None:
    """As the numbers that they stand for, and as the codes that they are: those of 4 bits on a CPU."""
    path, _ = write_gguf(name, tmp_path) if name in GGUF_TYPES else write(name, tmp_path)
    own = {**SMALL, "quantization": quantization}
    expected = tokens(str(path), **own)
    sizes = (2, 4) if quantization == "none" else (2,)  # with four, groups of 64 activations are other groups
    for size in sizes:
        found = tokens(str(path), tensor_parallel_size=size, collectives="threads", **own)
        if quantization == "none":
            assert found == expected
        else:  # activations are rounded in other sums, and a token that differs changes all that follow it
            pairs = zip(found, expected, strict=True)
            num_same = sum(sum(accumulate(map(int.__eq__, *pair), min)) for pair in pairs)
            assert num_same > 0.6 * sum(map(len, expected))


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_parts_of_a_quantised_weight(format: str) -> None:
    torch.manual_seed(0)
    whole = quantise(torch.randn(96, 256), format)
    numbers = whole.dequantise()
    for part in (range(32), range(32, 96), range(5, 7)):
        assert torch.equal(whole.rows(part).dequantise(), numbers[part.start : part.stop])
    for part in (range(128), range(128, 256), range(64, 160)):
        assert torch.equal(dequantised(whole.columns(part)), numbers[:, part.start : part.stop])
    tiled = QuantizedWeight(torch.randint(-8, 8, (96, 200)).char(), torch.rand(2, 5), tile=(48, 40))
    numbers = tiled.dequantise()
    for part in (range(10), range(40, 60), range(50, 96)):
        assert torch.equal(tiled.rows(part).dequantise(), numbers[part.start : part.stop])
    for part in (range(40), range(120, 200), range(50, 170)):
        assert torch.equal(dequantised(tiled.columns(part)), numbers[:, part.start : part.stop])


VARIANTS: dict[str, dict[str, Any]] = {
    "shared memory, a cache that is too small": {
        "collectives": "shared-memory",
        "num_kv_blocks": 40,
        "block_size": 16,
        "max_model_len": 320,
    },
    "gloo, guesses from the text": {"collectives": "gloo", "speculation": "ngram"},
    "a draft model": {"collectives": "shared-memory", "speculation": "draft"},
    "swapped to the host": {
        "collectives": "threads",
        "num_kv_blocks": 40,
        "max_model_len": 320,
        "host_cache_memory": 2**25,
        "preemption_mode": "swap",
        "async_scheduling": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_request(variant: str, cut: str, plain_answers: list[Any]) -> None:
    """Greedy and sampled, penalties, stop strings, grammars, logprobs; twice, so that prefixes are found."""
    options = {"speculation": "off", **VARIANTS[variant]}
    if options["speculation"] == "draft":
        options["draft_model"] = cut
    llm = LLM(cut, dtype="float32", tensor_parallel_size=2, **options)
    try:
        found, expected = answers(llm), plain_answers
        assert [one[:4] for one in found] == [one[:4] for one in expected]
        for (*_, own), (*_, others) in zip(found, expected, strict=True):
            assert [token for token, _ in own] == [token for token, _ in others]
            assert [value for _, value in own] == pytest.approx([value for _, value in others], abs=0.002)
        llm.engine.check_invariants()
        assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
    finally:
        llm.shutdown()
    assert not children()


def test_weights_in_8_bits_over_ranks() -> None:
    """The CPU's default: its groups of 64 inputs are the same on every rank, so only the order of sums differs."""
    found = []
    variants: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 3, "collectives": "threads"}]
    for options in variants:
        llm = LLM(max_model_len=256, num_kv_blocks=64, **options)
        outputs = llm.generate(["The capital of France is", "def fib(n):"], PARAMS[0], use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.shutdown()
    assert found[0] == found[1]


def children() -> list[int]:
    """Processes of ranks that run, below this one: other tests may have theirs."""
    parents: dict[int, int] = {}
    ranks: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"headway.worker.rank_process" in (folder / "cmdline").read_bytes():
                ranks.append(int(folder.name))
        except OSError:
            continue

    def is_ours(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return bool(pid)

    return [pid for pid in ranks if is_ours(pid)]


@pytest.mark.parametrize(
    ("collectives", "how", "message"),
    [
        ("shared-memory", signal.SIGKILL, r"rank 1 \(process PID\) ended with SIGKILL"),
        ("gloo", signal.SIGSTOP, r"rank 1 \(process PID\) has given no sign of life for 2 s, and is ended"),
    ],
)
def test_a_rank_that_is_killed_or_stopped(
    collectives: str,
    how: signal.Signals,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a program's own process there is nobody to start it again: every call says which rank it was. Nor does a rank
    import what lies in the working directory."""
    monkeypatch.setattr(rank_peers, "SILENT_S", 2.0)
    (tmp_path / "torch.py").write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    size: dict[str, Any] = {"num_kv_blocks": 256, "block_size": 4, "max_model_len": 512, "disk_cache": str(tmp_path)}
    llm = LLM(dtype="float32", tensor_parallel_size=2, collectives=collectives, **size)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    (pid,) = children()
    threading.Timer(1.0, os.kill, (pid, how)).start()
    started_s = time.monotonic()
    with pytest.raises(EngineDeadError, match=message.replace("PID", str(pid))) as raised:
        llm.generate(["Once upon a time"] * 4, params, use_tqdm=False)
    assert time.monotonic() - started_s < 20
    with pytest.raises(EngineDeadError, match="rank 1"):
        llm.generate(["Again"], params, use_tqdm=False)
    llm.shutdown()
    assert not children()
    # A line, if there was something to store.
    assert not [record for record in caplog.records if record.exc_info], "the loss of a rank says all"
    assert raised.value.__cause__ is None
    assert not (tmp_path / "imported").exists()


def test_streams_survive_the_death_of_ranks(cut: str) -> None:
    """Under an engine process: it ends with the rank, is started again, and its requests go on with the same tokens."""

    async def kill_in_the_middle(replica: Replica) -> list[int]:
        """A rank of each of two engines, one after the other, that has made some tokens."""
        engines: list[int] = []
        for _ in range(2):
            await until(lambda: replica.is_ready and replica.pid not in engines)
            assert replica.pid is not None
            limit = replica.stats.batch.generation_tokens + 80
            await until(lambda limit=limit: replica.stats.batch.generation_tokens > limit)
            (rank,) = children()
            os.kill(rank, signal.SIGKILL)
            engines.append(replica.pid)
        return engines

    async def test() -> None:
        llm = AsyncLLM(cut, dtype="float32", tensor_parallel_size=2, kv_cache_memory=2**27)
        async with asyncio.timeout(150), llm:
            expected = await streamed(llm)
            assert len(expected) == 2 * len(KINDS)
            killing = asyncio.create_task(kill_in_the_middle(llm._client.replicas[0]))
            assert await streamed(llm) == expected
            assert killing.done() and len(set(await killing)) == 2, "it was worth the while"
            assert llm._client.num_resumed > 0 and llm._client.num_open_streams == 0

    asyncio.run(test())
    assert not children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "9 heads over 3 key heads; use 1 to 3, or 9"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "collectives": "nccl"}, "for CUDA devices"),
        ({"collectives": "gloo"}, "for several ranks"),
        ({"tensor_parallel_size": 2, "collectives": "none", "disk_cache": "blocks"}, "disk_cache keeps whole blocks"),
        ({"tensor_parallel_size": 2, "collectives": "mpi"}, "collectives"),
    ],
)
def test_what_cannot_be_divided(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)
    assert not children()


def test_ranks_with_other_kernels_are_refused(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has loaded its own before the variable was set."""
    assert native.is_available()
    monkeypatch.setenv("HEADWAY_NATIVE_ISA", "nothing of the kind")
    with pytest.raises(ConfigError, match=r"rank 1 has .*torch kernels.* and rank 0 .*native kernels"):
        LLM(cut, dtype="float32", tensor_parallel_size=2, collectives="gloo", num_kv_blocks=64)
    assert not children()


def test_a_rank_that_cannot_start_is_named(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) ended before it answered"):
        LLM(cut, dtype="float32", tensor_parallel_size=2, num_kv_blocks=64)


PEAK = """
import resource, sys, threading
import torch
from headway.layers.collectives import Meeting, ThreadCollectives
from headway.loader import open_checkpoint
from headway.models import load_decoder
from headway.layers.collectives import Absent
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
checkpoint = open_checkpoint(sys.argv[1])
load_decoder(open_checkpoint(sys.argv[2]), ops="torch", ranks=Absent(0, 2))  # all is imported
before = peak()
decoder = load_decoder(checkpoint, ops="torch", ranks=Absent(1, int(sys.argv[3])))
print(peak() - before, decoder.num_bytes, max(info.num_bytes for info in checkpoint.index.values()))
"""


def test_loading_takes_the_shard_and_one_tensor(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 8192}
    folder = save_folder(hf_model("llama", **large, tie_word_embeddings=False), tmp_path / "large")
    small = save_folder(hf_model("llama"), tmp_path / "small")
    command = [sys.executable, "-c", PEAK, str(folder), str(small), "4"]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    taken, shard, tensor = map(int, done.stdout.split())
    whole = sum(info.num_bytes for info in open_checkpoint(folder).index.values())
    assert shard < 1.1 * whole / 4 + tensor
    assert taken <= shard + tensor + 8 * 2**20, f"{taken:,} for {shard:,} and a tensor of {tensor:,}"


@pytest.mark.parametrize("kind", ["threads", "shared memory"])
def test_sums_are_the_same_bits_on_every_rank(kind: str, tmp_path: Path) -> None:
    """And added up in the order of the ranks; parts larger than what is handed over at a time, too."""
    lengths = (700_000, 1, 17, 300_000, 576)
    parts = torch.randn(3, 700_000, generator=torch.Generator().manual_seed(1))
    meeting, path = Meeting(3), str(tmp_path / "memory")
    ranks: list[Collectives] = [
        ThreadCollectives(rank, meeting) if kind == "threads" else SharedMemoryCollectives(rank, 3, path)
        for rank in range(3)
    ]

    def run(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = [parts[rank, :length] for length in lengths]
        return [(ranks[rank].all_reduce(one.clone()), ranks[rank].all_gather(one.view(1, -1).clone())) for one in own]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    for place, length in enumerate(lengths):
        expected = parts[0, :length] + parts[1, :length] + parts[2, :length]
        for total, whole in (one[place] for one in found):
            assert torch.equal(total, found[0][place][0])
            assert torch.allclose(total, expected, atol=1e-6)
            assert torch.equal(whole[:, 0], parts[:, :length])


def test_waiting_ranks_are_let_go(tmp_path: Path) -> None:
    """One of three never comes."""
    ranks = [SharedMemoryCollectives(rank, 3, str(tmp_path / "memory")) for rank in range(3)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(rank.all_reduce, torch.ones(5)) for rank in ranks[:2]]
        with pytest.raises(TimeoutError):
            waiting[0].result(timeout=0.3)
        ranks[2].abort()
        for each in waiting:
            with pytest.raises(RuntimeError):
                each.result(timeout=25)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"), [(32, 8, (2, 4, 8, 16, 32)), (9, 3, (2, 3, 9)), (4, 1, (2, 4))]
)
def test_shards_are_the_whole(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    config = open_checkpoint("llama31-8b", "dummy").config
    config = replace(config, num_heads=heads, num_kv_heads=kv_heads, vocab_size=128_255, intermediate_size=14_337)
    for size in sizes:
        shards = [Shard.of(config, rank, size) for rank in range(size)]
        assert [head for shard in shards for head in shard.heads] == list(range(heads))
        assert [column for shard in shards for column in shard.columns] == list(range(14_337))
        assert [token for shard in shards for token in shard.vocab] == list(range(128_255))
        group = heads // kv_heads
        for shard in shards:
            assert shard.heads and {head // group for head in shard.heads} == set(shard.kv_heads)
            assert len(shard.heads) % len(shard.kv_heads) == 0


def test_rank_zero_alone_measures_a_shard(cut: str) -> None:
    llm = LLM(cut, dtype="float32", tensor_parallel_size=3, collectives="none", num_kv_blocks=64, max_model_len=128)
    try:
        assert isinstance(llm.engine.core.executor, RanksExecutor)
        assert llm.engine.plan.num_ranks == 3 and not children()
        output = llm.generate(["Hello"], PARAMS[0], use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 14
    finally:
        llm.shutdown()


def test_replicas_have_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,4,5")
    specs = divide(EngineSpec({"tensor_parallel_size": 2}), 2)
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["3,1", "4,5"]
    with pytest.raises(ConfigError, match="3 replicas need 2 GPUs each, and 4 are visible"):
        divide(EngineSpec({"tensor_parallel_size": 2}), 3)
