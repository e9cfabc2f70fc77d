"""Every option of the engine: the single source of Python keywords, command-line flags and reference docs.

Each section is a frozen dataclass; each field has a default and, in its metadata, the help text that `--help` and
docs/options.md print. `EngineConfig.from_options(block_size=32, ...)` builds all sections from flat keywords and
refuses names it does not know, pointing at the nearest one.

An option left open depends on the kind of device: `EngineConfig.resolve("cuda")` gives a `ResolvedConfig`, and the
engine reads only that. Options that depend on the checkpoint or on free memory are settled in `headway.worker`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway.kv_formats import FORMATS
from headway.option_fields import check_at_least, check_not_negative, check_values, option
from headway.settings import MAX_DRAFT_TOKENS, CacheSettings, DeviceSettings, SchedulerSettings

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "stored", "fp8", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
EVICTION_POLICIES = ("lru", "cost")
KV_CACHE_DTYPES = ("auto", *FORMATS, "bf16")
"""bf16 is another name of bfloat16."""
SCHEDULING_POLICIES = ("fcfs", "priority", "sjf", "srpt", "ltr", "hrrn", "slo", "fair", "mlfq", "prefix")
"""Each is the name of a class in headway/core/policy."""
BATCHING_MODES = ("continuous", "dynamic", "static")
PREFILL_MODES = ("chunked", "prefill-first", "decode-first")
KV_ALLOCATIONS = ("paged", "contiguous-max")
LENGTH_PREDICTORS = ("none", "statistics", "oracle")
"""The predictors with a name; any other value is a file."""
TRAFFIC_LOG_CONTENTS = ("hashed", "ids")
ATTENTION_BACKENDS = ("auto", "triton", "cpu", "torch_padded", "torch_reference")
GRAPH_CAPTURES = ("start", "lazy")
COLLECTIVES = ("auto", "nccl", "symmetric-memory", "shared-memory", "gloo", "threads", "none")

OFFLINE_OPTIONS: dict[str, Any] = {"target_itl_ms": 1000.0}
"""Defaults for offline use, where answers are read when complete, so that only throughput counts."""

RENAMED_OPTIONS = {
    "prefix_caching": ("enable_prefix_caching",),
    "cuda_graphs": ("enforce_eager", "cuda_graph_capture"),
    "overlap": ("async_scheduling",),
    "predict_lengths": ("length_predictor",),
}
"""Former names of options, with their present equivalents."""


@dataclass(frozen=True)
class _DeviceDefaults:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    target_itl_ms: float
    long_prompt_step_ms: float
    full_step_tokens: int
    async_scheduling: bool


_DEFAULTS = {
    "cpu": _DeviceDefaults(
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        target_itl_ms=0.0,
        long_prompt_step_ms=500.0,
        full_step_tokens=64,
        async_scheduling=False,
    ),
    "cuda": _DeviceDefaults(
        block_size=64,  # the memory unit of a GPU copies 64 tokens as one piece
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        target_itl_ms=20.0,
        long_prompt_step_ms=35.0,
        full_step_tokens=1024,  # attention's tiles of them, for 8 key heads, are as many as an H200 takes
        async_scheduling=True,
    ),
}
"""For each kind of device, the values of options that were left open."""


_HOST_BYTES_BEFORE_DISK = 2**30  # blocks pass through host memory on their way

ARRIVAL_BYTES = 2**30
CPU_ARRIVAL_BYTES = 2**28
"""The default memory for arriving blocks when prefill and decode are separate; the smaller one is for machines without
a GPU. Blocks need it only until they are copied in."""
PREFILL_STEP_TOKENS = 2048
"""The default token limit of a step on a GPU that only prefills. Such steps are as fast as larger ones (H200), and a
chunk's blocks are sent while the next chunk is computed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model to load, and in which number format."""

    model: str | None = option(
        None,
        "Local folder in Hugging Face format, a .gguf file, a hub id such as Qwen/Qwen3-0.6B or, for one GGUF file of "
        "several, owner/name:Q4_K_M; or with --load-format dummy a config.json or the name of a built-in shape. "
        "Default: the embedded SmolLM2-135M-Instruct.",
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a model of the hub. Default: main, as the cache has it; 'headway pull' asks for what "
        "is new.",
    )
    offline: bool = option(
        False,
        "Use only models that are on this machine already, and fetch nothing. HF_HUB_OFFLINE=1 in the environment does "
        "the same.",
    )
    tokenizer: str | None = option(None, "Folder or .gguf file to take the tokenizer from. Default: the model itself.")
    chat_template: str | None = option(
        None,
        "A Jinja file, or the text of a template, that makes prompts of conversations in place of the model's own.",
        metavar="FILE",
    )
    draft_model: str | None = option(
        None,
        "With --speculation draft: a smaller model with the same vocabulary, which guesses; named as the model is.",
        metavar="MODEL",
    )
    load_format: str = option(
        "auto", "How weights are stored; 'dummy' fills the model's shape with random numbers.", choices=LOAD_FORMATS
    )
    dtype: str = option(
        "auto",
        "Number format of activations and unquantised weights. auto: float32 on CPU (with int8 weights, see "
        "--quantization), the checkpoint's own on CUDA. float32 is the exact reference everywhere.",
        choices=DTYPES,
    )
    quantization: str = option(
        "auto",
        "Number format of the linear layers' weights. auto: stored on CUDA; int8 on CPU when --dtype is auto and the "
        "native kernels are there, otherwise none. stored: as the checkpoint has them (on CPU 4 bits; 8 bits become "
        "int8). fp8 (CUDA only), int8 and int4 quantise at load. none: floats.",
        choices=QUANTIZATIONS,
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output, in tokens. Default: what the model was made for, or what the KV cache can hold if "
        "that is less.",
    )
    seed: int = option(0, "Seed of requests that bring none of their own, and of dummy weights.")

    def __post_init__(self) -> None:
        check_values(self)
        if self.revision == "":
            raise ConfigError("revision is empty; name a branch, a tag or a commit, or leave it out.")
        if self.chat_template == "":
            raise ConfigError("chat_template is empty; name a file, or leave it out for the model's own.")
        check_at_least(self, "max_model_len", 2)
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be a 64-bit number, not {self.seed}.")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much memory the KV cache gets, and how it is divided."""

    block_size: int | None = option(None, "Tokens per KV block, 1 to 256. Default: 16 on CPU, 64 on CUDA.")
    gpu_memory_utilization: float = option(
        0.9, "On CUDA: share of the device's memory for weights, activations and KV cache together, in (0, 1]."
    )
    kv_cache_memory: int | None = option(
        None,
        "Bytes for the KV cache, e.g. 2GiB or 500MB. Default: what gpu_memory_utilization leaves on CUDA; on CPU 512 "
        "MiB or what max_num_seqs full-length requests need, whichever is less.",
        metavar="BYTES",
    )
    num_kv_blocks: int | None = option(None, "Exact number of KV blocks; overrides the memory options.")
    host_cache_memory: int | None = option(
        None,
        "Bytes of host memory for KV blocks that had to leave the device, e.g. 16GiB; they are copied back when a "
        "request needs them. Default: none.",
        metavar="BYTES",
    )
    arrival_memory: int | None = option(
        None,
        "On CUDA: bytes of device memory where KV blocks arrive from other GPUs (--roles), in place of "
        "host_cache_memory. Default: 1 GiB with roles.",
        metavar="BYTES",
    )
    disk_cache: str = option(
        "",
        "Folder for KV blocks that leave host memory, and for those kept when the engine ends; later engines, and "
        "others that share it, find them. host_cache_memory is 1 GiB then if none is given.",
        metavar="DIR",
    )
    disk_cache_size: int = option(
        16 * 2**30,
        "Bytes that the files in disk_cache may take together; those used longest ago are deleted first.",
        metavar="BYTES",
    )
    enable_prefix_caching: bool = option(
        True,
        "Keep the KV blocks of finished requests while there is room, and start requests that begin with the same "
        "tokens from them.",
    )
    eviction_policy: str = option(
        "lru",
        "Which kept block is given up first when room is needed: the one unused for longest (lru), or the one that was "
        "learnt to be least likely found again (cost).",
        choices=EVICTION_POLICIES,
    )
    kv_allocation: str = option(
        "paged",
        "What memory a request takes. paged: blocks as it grows. contiguous-max: when it enters the batch, room for "
        "max_model_len tokens, as engines without paging do; for comparison. It cannot share blocks: no prefix cache.",
        choices=KV_ALLOCATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Number format of cached keys and values. auto: the model's own dtype, float16 where its weights are int8. "
        "fp8, int8 and int4: more tokens in the same memory for a little quality (docs/kv_quantisation.md). bf16 is "
        "bfloat16.",
        choices=KV_CACHE_DTYPES,
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.kv_cache_dtype == "bf16":
            object.__setattr__(self, "kv_cache_dtype", "bfloat16")
        if self.block_size is not None and not 1 <= self.block_size <= 256:
            raise ConfigError(f"block_size must be between 1 and 256, not {self.block_size}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}.")
        check_at_least(self, "kv_cache_memory", 1)
        check_at_least(self, "num_kv_blocks", 1)
        check_at_least(self, "host_cache_memory", 1)
        if self.host_cache_memory is not None and not self.enable_prefix_caching:
            raise ConfigError("host_cache_memory keeps blocks of the prefix cache, and enable_prefix_caching is False.")
        if self.host_cache_memory is not None and self.kv_allocation != "paged":
            raise ConfigError(f"host_cache_memory needs paged KV blocks, and kv_allocation is '{self.kv_allocation}'.")
        check_at_least(self, "arrival_memory", 1)
        if self.arrival_memory is not None and (self.host_cache_memory is not None or self.disk_cache):
            raise ConfigError("arrival_memory takes the place of host_cache_memory, which disk_cache needs; give one.")
        if self.arrival_memory is not None and not (self.enable_prefix_caching and self.kv_allocation == "paged"):
            raise ConfigError("arrival_memory is for blocks of the prefix cache, which needs paged KV blocks.")
        if self.disk_cache and not self.enable_prefix_caching:
            raise ConfigError("disk_cache keeps blocks of the prefix cache, and enable_prefix_caching is False.")
        if self.disk_cache and self.kv_allocation != "paged":
            raise ConfigError(f"disk_cache needs paged KV blocks, and kv_allocation is '{self.kv_allocation}'.")
        check_at_least(self, "disk_cache_size", 1)
        if self.kv_cache_memory is not None and self.num_kv_blocks is not None:
            raise ConfigError("kv_cache_memory and num_kv_blocks both size the KV cache; give one of them.")

    def resolve(self, device: str) -> CacheSettings:
        """Settle what depends on the kind of device, "cpu" or "cuda"."""
        if self.arrival_memory is not None and device != "cuda":
            raise ConfigError("arrival_memory is memory of a GPU, and the engine runs on the CPU.")
        block_size = self.block_size or _DEFAULTS[device].block_size
        host_cache_memory = self.host_cache_memory
        if host_cache_memory is None and self.disk_cache:
            host_cache_memory = _HOST_BYTES_BEFORE_DISK
        settled = {"block_size": block_size, "host_cache_memory": host_cache_memory}
        return CacheSettings(**{**dataclasses.asdict(self), **settled})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Which requests may share a step, and which are scheduled first."""

    max_num_seqs: int | None = option(None, "Most requests that run at once. Default: 64 on CPU, 256 on CUDA.")
    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step, over all requests. Default: 512 on CPU, 8192 on CUDA."
    )
    target_itl_ms: float | None = option(
        None,
        "Time between two tokens of a request, in milliseconds, that 99 of 100 tokens should keep: prompts are "
        "computed beside requests that generate in chunks that fit, as far as earlier steps tell; in a backlog up to "
        "2.5 times that. 0: none; steps are as long as they gain throughput. Default: 20 on CUDA, 0 on CPU; 1000 for "
        "offline work: the class LLM, offline benchmarks.",
        metavar="MS",
    )
    max_chunk_tokens: int | None = option(
        None, "Most tokens of one request in one step. Default: all that the step's budget leaves."
    )
    short_prompt_share: float = option(
        0.15,
        "How much a long prompt, one that takes several steps, may be slowed for later ones that fit into one step and "
        "so need not wait for its end: their tokens, in proportion to its own. 0: strict order.",
    )
    long_prompt_step_ms: float | None = option(
        None,
        "How long a step may take in which a long prompt is computed, so that requests that come meanwhile get in "
        "soon; on CUDA 1024 tokens always. 0: as long as any. Default: 35 on CUDA, 500 on CPU.",
        metavar="MS",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who goes first and who gives way (docs/policies.md).",
        choices=SCHEDULING_POLICIES,
    )
    batching: str = option(
        "continuous",
        "When requests enter and leave the batch. continuous: at any step. static: a batch is formed of what waits, "
        "and no request enters or leaves until its longest answer is done. dynamic: the same, but a batch waits until "
        "it is full or batch_window_ms have passed, and its requests are of about the same length.",
        choices=BATCHING_MODES,
    )
    batch_window_ms: float = option(
        50.0, "With dynamic batching: how long the first request of a batch waits for others.", metavar="MS"
    )
    prefill_mode: str = option(
        "chunked",
        "How prompts are computed. chunked: in pieces beside the requests that generate. prefill-first: whole, in "
        "steps of their own, before any decode. decode-first: whole, in steps of their own, when no request decodes.",
        choices=PREFILL_MODES,
    )
    starvation_ms: float = option(
        300.0,
        "A request that a policy lets others pass is lifted to the front of the queue when it has waited "
        "starvation_stretch times as long as it would have in order of arrival, and this many milliseconds more. 0: "
        "never.",
        metavar="MS",
    )
    starvation_stretch: float = option(10.0, "See starvation_ms.")
    max_preemptions: int = option(
        4, "A request that was preempted this many times is preempted again only if all others were, too."
    )
    max_head_skips: int = option(
        64,
        "How many requests may be admitted past one that does not fit in the free KV blocks, before it blocks the "
        "queue until there is room. 0: strict order.",
    )
    preemption_mode: str = option(
        "auto",
        "How a preempted request comes back, where there is a host cache: its blocks are copied back (swap), its "
        "tokens are computed again (recompute), or whichever is faster by measurement (auto).",
        choices=("auto", "recompute", "swap"),
    )
    skip_window: int = option(8, "How many waiting requests a step looks at, past one that does not fit.")
    speculation: str = option(
        "off",
        "Guess the next tokens of requests and verify several in one step, where that is worth its time; the tokens "
        "are the same (docs/speculation.md). ngram: guesses come from the request's own text. draft: from "
        "--draft-model. auto: ngram.",
        choices=("off", "auto", "ngram", "draft"),
    )
    max_draft_tokens: int = option(8, "Most guesses that are verified for one request in one step.")
    spec_synthetic_acceptance: float = option(
        0.0,
        "For benchmarks, since answers become nonsense: guesses are made up and accepted at random; a request with "
        "max_draft_tokens of them gets this many tokens a step on average. 0: real guesses.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "skip_window", "max_draft_tokens"):
            check_at_least(self, name, 1)
        check_at_least(self, "max_head_skips", 0)
        check_at_least(self, "max_preemptions", 1)
        for name in (
            "target_itl_ms",
            "long_prompt_step_ms",
            "short_prompt_share",
            "batch_window_ms",
            "starvation_ms",
            "starvation_stretch",
        ):
            check_not_negative(self, name)
        if self.batching == "dynamic" and self.scheduling_policy != "fcfs":
            raise ConfigError(
                "Dynamic batching groups requests by length, and its line is in no other order than that of arrival: "
                f"scheduling_policy '{self.scheduling_policy}' does not go with it."
            )
        if self.max_draft_tokens > MAX_DRAFT_TOKENS:
            raise ConfigError(f"max_draft_tokens must be at most {MAX_DRAFT_TOKENS}, not {self.max_draft_tokens}.")
        if self.spec_synthetic_acceptance:
            if self.speculation == "off":
                raise ConfigError("spec_synthetic_acceptance is given, but speculation is off.")
            if self.speculation == "draft":
                raise ConfigError("spec_synthetic_acceptance makes guesses up, and a draft model would, too.")
            if not 1.0 <= self.spec_synthetic_acceptance <= 1.0 + self.max_draft_tokens:
                raise ConfigError(
                    "spec_synthetic_acceptance is the mean number of tokens a step, from 1 to 1 + max_draft_tokens "
                    f"({1 + self.max_draft_tokens}), not {self.spec_synthetic_acceptance}."
                )
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is not None and num_tokens is not None and num_tokens < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({num_tokens}) must be at least max_num_seqs ({num_seqs}): every running "
                "request needs a token per step."
            )

    def resolve(self, device: str) -> SchedulerSettings:
        """Settle what depends on the kind of device, "cpu" or "cuda". A limit left open adapts to the limits that were
        set."""
        default = _DEFAULTS[device]
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is None:
            num_seqs = default.max_num_seqs if num_tokens is None else min(default.max_num_seqs, num_tokens)
        if num_tokens is None:
            num_tokens = max(default.max_num_batched_tokens, num_seqs)
        settled = {
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": num_tokens,
            "max_chunk_tokens": num_tokens,
            "target_itl_ms": default.target_itl_ms,
            "long_prompt_step_ms": default.long_prompt_step_ms,
            "full_step_tokens": default.full_step_tokens,
        }
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        speculation = "ngram" if self.speculation == "auto" else self.speculation
        return SchedulerSettings(**{**settled, **given, "speculation": speculation})


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """Which predictor estimates the lengths of answers, and which traffic log it learns from."""

    length_predictor: str = option(
        "none",
        "Who guesses the number of output tokens of a request that does not bring a guess, for policies that let short "
        "answers go first: 'statistics' learns while serving, 'oracle' takes max_tokens, and a file that 'headway "
        "train-predictor' wrote has learnt before (docs/length_prediction.md).",
        metavar="none|statistics|oracle|FILE",
    )
    traffic_log: str | None = option(
        None,
        "Append a line to this file for each completion that has ended, for 'headway train-predictor'. Default: none.",
        metavar="FILE",
    )
    traffic_log_content: str = option(
        "hashed",
        "What the traffic log keeps of prompts. hashed: counts of hashed tokens, from which prompts cannot be read, "
        "though guesses can be checked. ids: token ids, text and user.",
        choices=TRAFFIC_LOG_CONTENTS,
    )

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("length_predictor", "traffic_log"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty; name a file or leave it out.")

    @property
    def is_learned(self) -> bool:
        """Whether the predictor is a file, from training."""
        return self.length_predictor not in LENGTH_PREDICTORS

    @property
    def is_off(self) -> bool:
        """Whether lengths are neither predicted nor logged."""
        return self.length_predictor == "none" and self.traffic_log is None


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which device holds the tensors, and which kernels compute on them."""

    device: str = option("auto", "auto takes the first CUDA device if there is one.", choices=DEVICES)
    num_threads: int | None = option(None, "CPU threads. Default: the cores this process may use.")
    attention_backend: str = option(
        "auto",
        "Attention kernels. auto: triton on CUDA, cpu on the CPU where the kernels can be compiled, else torch_padded.",
        choices=ATTENTION_BACKENDS,
    )
    enforce_eager: bool = option(
        False, "On CUDA: launch the kernels of each step one by one, without CUDA graphs. Slower; to look for a fault."
    )
    cuda_graph_capture: str = option(
        "start",
        "On CUDA: when steps are captured as graphs. start: servers and benchmarks capture all sizes before the first. "
        "lazy: a size is captured when it comes up for the second time.",
        choices=GRAPH_CAPTURES,
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that have a part of every layer: each with a GPU, or on the CPU with a process.",
    )
    collectives: str = option(
        "auto",
        "How ranks sum their parts. auto: nccl with a GPU each, symmetric-memory where they share one, shared-memory "
        "on the CPU. gloo, threads: for tests. none: one rank alone, to measure a shard; its answers are wrong.",
        choices=COLLECTIVES,
    )
    async_scheduling: bool | None = option(
        None,
        "Plan and launch a step while the one before it still runs. Changes speed only. Default: on for CUDA, off on "
        "CPU.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_at_least(self, "num_threads", 1)
        check_at_least(self, "tensor_parallel_size", 1)
        if self.collectives != "auto" and self.tensor_parallel_size == 1:
            raise ConfigError(f"collectives '{self.collectives}' are for several ranks: give tensor_parallel_size.")
        if self.enforce_eager and self.cuda_graph_capture == "lazy":
            raise ConfigError("cuda_graph_capture 'lazy' captures graphs later, and enforce_eager wants none at all.")

    def resolve(self, device: str) -> DeviceSettings:
        """Settle what depends on the kind of device, "cpu" or "cuda"."""
        is_async = self.async_scheduling
        return DeviceSettings(
            kind=device,
            num_threads=self.num_threads,
            attention_backend=self.attention_backend,
            graphs="off" if self.enforce_eager else "lazy" if self.cuda_graph_capture == "lazy" else "all",
            async_scheduling=_DEFAULTS[device].async_scheduling if is_async is None else is_async,
            tensor_parallel_size=self.tensor_parallel_size,
            collectives=self.collectives,
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All sections. The same flat names work in `LLM(...)`, here, and on the command line."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        if (self.scheduler.speculation == "draft") != (self.model.draft_model is not None):
            raise ConfigError(
                "speculation 'draft' needs a model that guesses: give draft_model."
                if self.model.draft_model is None
                else f"draft_model is given, but speculation is '{self.scheduler.speculation}'; use 'draft'."
            )
        if self.cache.disk_cache and self.device.collectives == "none":
            raise ConfigError("disk_cache keeps whole blocks, and with collectives 'none' there is one rank's part.")
        if self.scheduler.scheduling_policy == "ltr" and not self.prediction.is_learned:
            raise ConfigError(
                "scheduling_policy 'ltr' needs a learned ranking, and length_predictor is "
                f"'{self.prediction.length_predictor}', not a file. To make one, run for a while with traffic_log "
                "traffic.jsonl, then 'headway train-predictor traffic.jsonl -o lengths.model', and give "
                "length_predictor lengths.model. Policy 'sjf' works without."
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Sort flat options into their sections. Unknown name: `ConfigError` with the nearest valid one."""
        known = {f.name: section for section, f in iter_options()}
        check_names(options)
        sections: dict[str, Any] = {}
        for section_field in dataclasses.fields(cls):
            section = section_field.default_factory
            assert isinstance(section, type)
            chosen = {name: value for name, value in options.items() if known[name] is section}
            sections[section_field.name] = section(**chosen)
        return cls(**sections)

    def options_for_roles(self, *, has_gpu: bool, crosses_network: bool) -> dict[str, Any]:
        """The additional options of engines whose prefill and decode are separate: memory for arriving blocks. Raises
        `ConfigError` for options that do not work with that."""
        if not self.cache.enable_prefix_caching:
            raise ConfigError("roles need the prefix cache, by which blocks are found; it is switched off.")
        if self.device.tensor_parallel_size != 1:
            raise ConfigError("roles do not go with tensor_parallel_size: ranks have parts of blocks.")
        if self.model.draft_model is not None:
            raise ConfigError("roles do not go with a draft model, whose blocks would have to travel as well.")
        if self.scheduler.preemption_mode == "recompute":
            raise ConfigError("roles do not go with --preemption-mode recompute: blocks that come are copied in.")
        if self.cache.host_cache_memory is not None or self.cache.arrival_memory is not None:
            return {}
        if has_gpu and not crosses_network and not self.cache.disk_cache:
            return {"arrival_memory": ARRIVAL_BYTES}
        return {"host_cache_memory": ARRIVAL_BYTES if has_gpu or crosses_network else CPU_ARRIVAL_BYTES}

    def resolve(self, device: str) -> ResolvedConfig:
        """Settle what the options and the kind of device, "cpu" or "cuda", decide."""
        return ResolvedConfig(
            model=self.model,
            cache=self.cache.resolve(device),
            scheduler=self.scheduler.resolve(device),
            device=self.device.resolve(device),
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The settings that an engine is built from. Lengths of answers are predicted outside the engine."""

    model: ModelConfig
    cache: CacheSettings
    scheduler: SchedulerSettings
    device: DeviceSettings


def iter_options() -> Iterator[tuple[type, dataclasses.Field[Any]]]:
    """Every option with the section that owns it, in documentation order."""
    for section in (ModelConfig, CacheConfig, SchedulerConfig, PredictionConfig, DeviceConfig):
        for option_field in dataclasses.fields(section):
            yield section, option_field


def option_names() -> set[str]:
    """The names of all options."""
    return {option_field.name for _, option_field in iter_options()}


def check_names(options: Iterable[str]) -> None:
    """Raise `ConfigError` for the first name that is not an option. The message gives its new name or the nearest
    one."""
    known = option_names()
    for name in options:
        if name in RENAMED_OPTIONS:
            raise ConfigError(f"{name} is now {' and '.join(map(_with_values, RENAMED_OPTIONS[name]))}.")
        if name not in known:
            raise ConfigError(f"Unknown option '{name}'.{did_you_mean(name, tuple(sorted(known)))}")


def _with_values(name: str) -> str:
    """An option's name, and its possible values if they are few."""
    section, option_field = next(one for one in iter_options() if one[1].name == name)
    if typing.get_type_hints(section)[name] in (bool, bool | None):
        return f"{name} (True or False)"
    choices = option_field.metadata["choices"]
    return name if choices is None else f"{name} ({' or '.join(map(repr, choices))})"
