"""The disk cache changes speed only: tokens in float32, greedy and drawn, are those of each request alone, in the next
engine too, however the last one ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.core import DiskIndex, HostTier
from headway.engine import block_pump
from headway.errors import ConfigError
from headway.front.deployment import Deployment
from headway.front.engine_client import EngineClient
from headway.front.supervision import Backoff
from headway.transfer.host_blocks import HostBlocks
from headway.wire.messages import AddRequest
from tests.integration.conversations import MAX_MODEL_LEN, MAX_TOKENS, Alone, Conversations, greedy
from tests.integration.server_process import running_server
from tests.unit.front.served import read, until
from tests.unit.models.tiny import hf_model, random_prompt, save_folder
from tests.unit.runner.tiny_llm import VOCAB_SIZE, TinyLLM

NUM_KILLS = int(os.environ.get("HEADWAY_KILL_ROUNDS", "4"))

# Host memory for few blocks, so that nearly all are on disk only.
VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 2": {"block_size": 2, "num_kv_blocks": 60, "host_cache_memory": 2**15},
    "blocks of 16": {"block_size": 16, "num_kv_blocks": 12, "host_cache_memory": 2**16},
    "three slots": {"block_size": 4, "num_kv_blocks": 40, "host_cache_memory": 3 * 4 * 512},
    "overlapping steps": {
        "block_size": 5,
        "num_kv_blocks": 40,
        "host_cache_memory": 2**15,
        "async_scheduling": True,
    },
    "small disk": {"block_size": 4, "num_kv_blocks": 40, "host_cache_memory": 2**15, "disk_cache_size": 40 * 2112},
    "swapping": {"block_size": 2, "num_kv_blocks": 24, "host_cache_memory": 2**15, "preemption_mode": "swap"},
    "ranks": {
        "block_size": 5,
        "num_kv_blocks": 40,
        "host_cache_memory": 2**14,
        "tensor_parallel_size": 2,
        "collectives": "threads",
        "async_scheduling": True,
    },
}


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model computes faster than any disk reads, and on a busy machine than blocks are copied."""
    monkeypatch.setattr(DiskIndex, "is_worth_fetching", lambda *_: True)
    monkeypatch.setattr(HostBlocks, "measure_restore", lambda _: 0.0)


def tier_of(llm: LLM) -> HostTier:
    tiers = llm.engine.core.scheduler.kv_cache.tiers
    assert tiers is not None and tiers.host.disk is not None
    return tiers.host


@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_each_request_alone_over_several_lives(
    tiny: TinyLLM, alone: Alone, tmp_path: Path, variant: str
) -> None:
    num_fetched = num_stored = 0
    for _ in range(3):
        llm = tiny.on_cpu(max_num_seqs=6, disk_cache=str(tmp_path), **VARIANTS[variant])
        max_prompt = 20 if variant == "swapping" else 100
        talk = Conversations(llm, random.Random(3), vocab_size=VOCAB_SIZE, max_prompt=max_prompt, max_tokens=12)
        alone.check(talk.run(25))  # the same prompts in each life
        stats = tier_of(llm).stats
        llm.shutdown()
        num_fetched += stats.num_fetched_blocks
        num_stored += stats.num_stored_blocks
        assert not stats.num_failed_stores
    assert num_fetched >= 5 and num_stored >= 20
    assert list(tmp_path.glob("*/*/*.kv")) and not list(tmp_path.glob("*/*/*.tmp"))


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read when a request wants them."""
    monkeypatch.setattr(block_pump, "LOAD_LATEST_S", 0.0)


@pytest.mark.usefixtures("always_worth_it", "nothing_loaded")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=1.5, top_p=0.9, seed=11, max_tokens=MAX_TOKENS, n=2),
        SamplingParams(temperature=1.0, seed=5, max_tokens=3, logprobs=2),
    ],
)
def test_a_restarted_engine_finds_its_prefixes(tiny: TinyLLM, tmp_path: Path, params: SamplingParams) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (97, 50, 17)]
    plain = tiny.on_cpu(enable_prefix_caching=False)
    expected = [tokens(plain, prompt, params) for prompt in prompts]
    options = {"block_size": 16, "disk_cache": str(tmp_path)}
    first = tiny.on_cpu(**options)
    assert [tokens(first, prompt, params) for prompt in prompts] == expected
    first.shutdown()
    second = tiny.on_cpu(**options, host_cache_memory=7 * 16 * 512)
    outputs = [second.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [96, 48, 16]
    assert tier_of(second).stats.num_fetched_blocks == 6 + 3 + 1
    second.shutdown()


def tokens(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return [one.token_ids for one in output.outputs]


@pytest.mark.usefixtures("always_worth_it")
def test_another_model_or_format_finds_nothing(tiny: TinyLLM, tmp_path: Path) -> None:
    prompt = list(range(64))
    params = SamplingParams(temperature=0, max_tokens=1)
    own = {"disk_cache": str(tmp_path / "kv"), "block_size": 16}
    first = tiny.on_cpu(**own)
    first.generate(prompt, params, use_tqdm=False)
    first.shutdown()
    deeper = TinyLLM(tmp_path, MAX_MODEL_LEN, num_hidden_layers=3)
    changes: list[tuple[TinyLLM, dict[str, Any]]] = [
        (tiny, {"seed": 1}),
        (tiny, {"block_size": 8}),
        (tiny, {"kv_cache_dtype": "int8"}),
        (tiny, {"tensor_parallel_size": 2, "collectives": "threads"}),
        (deeper, {}),
    ]
    for model, options in changes:
        llm = model.on_cpu(**{**own, **options})
        assert not len(tier_of(llm).disk or ()), options
        assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0
        llm.shutdown()
    again = tiny.on_cpu(**own)
    assert again.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 48
    again.shutdown()


@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize(("num_ranks", "collectives"), [(2, "auto"), (3, "threads")])
def test_parts_of_different_size_are_one_block(num_ranks: int, collectives: str, tmp_path: Path) -> None:
    """5 key heads over 2 processes, and over 3 threads; each engine finds its own blocks again, and only those."""
    shape = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 8}
    folder = str(save_folder(hf_model("qwen3", **shape), tmp_path / "model"))
    prompts = [random_prompt(length, seed=length) for length in (97, 50, 17)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "num_kv_blocks": 40, "block_size": 16}
    plain = LLM(folder, enable_prefix_caching=False, **options)
    expected = [tokens(plain, prompt, params) for prompt in prompts]
    own: dict[str, Any] = {"tensor_parallel_size": num_ranks, "collectives": collectives, **options}
    own["disk_cache"] = str(tmp_path / "kv")
    for found in ([0, 0, 0], [96, 48, 16]):
        llm = LLM(folder, **own)
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        assert [[one.token_ids for one in output.outputs] for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == found
        assert tier_of(llm).stats.num_fetched_blocks == sum(found) // 16
        llm.shutdown()
    files = list((tmp_path / "kv").glob("*/*/*.kv"))
    assert len({file.parent for file in files}) == 1 and len({file.stat().st_size for file in files}) == 1
    assert files[0].stat().st_size > 2 * 2 * 5 * 8 * 4 * 16, "all heads of both layers are in it"


def test_what_cannot_be_had_is_refused(tiny: TinyLLM, tmp_path: Path) -> None:
    for options, words in (
        ({"disk_cache": str(tmp_path), "enable_prefix_caching": False}, "enable_prefix_caching is False"),
        ({"disk_cache": str(tmp_path), "kv_allocation": "contiguous-max"}, "needs paged KV blocks"),
        ({"disk_cache": str(tmp_path), "disk_cache_size": 0}, "disk_cache_size"),
    ):
        with pytest.raises(ConfigError, match=words):
            tiny.on_cpu(**options)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engines_that_are_killed_leave_nothing_wrong(
    num_ranks: int, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, in the same folder: whatever they answer is right."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    rng, numbers = random.Random(8), itertools.count()
    beginnings = [[rng.randrange(5, 2000) for _ in range(100)] for _ in range(6)]
    options: dict[str, Any] = {"model": cut, "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    own = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 6, "tensor_parallel_size": num_ranks}
    block = 2 * 2 * 4 * 192 * 4
    own |= {"host_cache_memory": 30 * block, "disk_cache": str(tmp_path), "disk_cache_size": 200 * block}
    found: list[tuple[tuple[int, ...], list[int]]] = []

    async def ask_on(client: EngineClient) -> None:
        for number in numbers:
            prompt = [*rng.choice(beginnings)[: rng.randint(1, 100)], number % 90]
            deltas = await read(client.submit(AddRequest(f"r{number}", prompt, greedy(12))))
            found.append((tuple(prompt), [token for delta in deltas for token in delta.token_ids]))

    async def test() -> None:
        factory = "tests.integration.fetching_engine:create_engine"
        deployment = Deployment({**options, **own}, factory=factory, log_level="CRITICAL")
        client = EngineClient(deployment, backoff=lambda: Backoff(first_s=0.05))
        await client.start()
        (replica,), num_fetched = client.replicas, 0
        dead: list[int | None] = [None]
        asking = [asyncio.create_task(ask_on(client)) for _ in range(6)]
        while len(dead) <= NUM_KILLS:
            await until(lambda: replica.is_ready and replica.pid not in dead)
            await asyncio.sleep(rng.uniform(0.2, 0.8))
            await until(lambda: len(found) >= 10 * len(dead))
            assert replica.pid is not None
            num_fetched += replica.stats.tiers.num_fetched_blocks > 0
            dead.append(replica.pid)
            os.kill(replica.pid, signal.SIGKILL)
        await until(lambda: replica.is_ready and replica.pid not in dead)
        for task in asking:
            assert not task.done() and task.cancel()
        await client.shutdown()
        assert num_fetched >= NUM_KILLS // 2

    asyncio.run(asyncio.wait_for(test(), 200))
    alone = Alone(LLM(**options, enable_prefix_caching=False), 12)
    for prompt, tokens in found:
        assert alone.answer(prompt) == tokens


def test_a_server_that_is_stopped_and_started_again_finds_its_prefixes(cut: str, tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time there was a queue. " * 40, "max_tokens": 3, "temperature": 0}
    answers = []
    for _ in range(2):
        with running_server("--model", cut, "--disk-cache", str(tmp_path), "--max-model-len", "1024") as server:
            until_s = time.monotonic() + 30
            while answers and server.gauges()["kv_blocks_host"] < 20:
                assert time.monotonic() < until_s, "what was loaded is not told before somebody asks"
                time.sleep(0.05)
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
            answers.append((answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
            gauges = server.gauges()
            assert server.terminate() == 0
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == 0 and answers[1][1] >= 300
    assert gauges["kv_blocks_fetched_total"] >= 20 and gauges["kv_blocks_disk"] >= 20
