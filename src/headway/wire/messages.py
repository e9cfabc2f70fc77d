"""What the front end and the engine process say to each other: typed records, carried as msgpack (see `channel`).

Each direction has one union, and only its members travel as messages of their own; every other record is a part of one
of them. All are packed as arrays, without field names: both ends are always of the same version. The parts hold nothing
that could form a cycle, so the garbage collector need not look at them. A request's own records, `SamplingParams` and
`RequestOptions`, travel as they are; they check themselves when they are unpacked.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import InvalidRequestError
from headway.outputs import Delivered, SilentProgress
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats, StepKind

Role = Literal["prefill", "decode"]


class _Message(msgspec.Struct, tag=True, array_like=True):
    """A record that travels by itself; its name says which it is."""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """A record inside a message."""


# ---- to the engine --------------------------------------------------------------------------------------------------


class BlockExchange(_Part):
    """How KV blocks go from engines that compute prompts to those that answer."""

    role: Role
    """prefill: this engine hands them out · decode: it fetches them."""
    folder: str = ""
    """For sockets, on this machine; only this user may read it."""
    carrier: Literal["auto", "tcp"] = "auto"
    """auto: what the processes of one machine share. tcp: over the network."""


class Start(_Message):
    """The first message: which engine to build."""

    options: dict[str, Any]
    """Flat options of `EngineConfig`; another factory may know others."""
    log_level: str = "INFO"
    counted: EngineStats | None = None
    """The last numbers of the engine before this one: the counters among them go on from there."""
    heartbeat_s: float = 1.0
    """How often the process is to say that it lives."""
    reports_cache: bool = False
    """Whether it is to tell which blocks its prefix cache holds."""
    cores: list[int] = []
    """The cores that it may run on, where it is not to take all of them."""
    blocks: BlockExchange | None = None
    """Where prefill and decode are apart: its part in that."""


class AddRequest(_Message):
    """Queue a request. Its outcome comes as deltas, a refusal included."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | None
    """None: those of the request before it. All prompts of an HTTP request have the same parameters, which may be
    larger than their prompts, and travel once. With `bad_words` they say how these are spelt: the front end tokenises,
    the engine's loop has steps to make."""
    options: RequestOptions = DEFAULT_OPTIONS
    delivered: list[Delivered] | None = None
    """Of a request that goes on from another engine: what its reader has got of each of its completions."""


class AbortRequests(_Message):
    """End requests before the next step. No delta follows for them; ids that are not live are passed over."""

    request_ids: list[str]


class Watch(_Message):
    """Whether snapshots are wanted."""

    on: bool


class ReportCache(_Message):
    """Report the whole prefix cache again: a report was missing."""


class Shutdown(_Message):
    """Refuse new requests, go on with the others for at most `drain_s` seconds, then exit."""

    drain_s: float


ToEngine = Start | AddRequest | AbortRequests | Watch | ReportCache | Shutdown


# ---- from the engine ------------------------------------------------------------------------------------------------


class EngineReady(_Message):
    """The engine takes requests, and these are its measures."""

    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    scheduling_policy: str = "fcfs"
    prefix_caching: bool = True
    num_host_slots: int = 0
    """Blocks for which there is room in host memory."""
    exit_s: float = 0.0
    """What the engine may take to store blocks when it is ended."""
    hidden_size: int = 0
    """The length of the model's vectors."""
    blocks_at: str = ""
    """Where it hands out KV blocks, if it does: see `block_server`."""
    block_format: str = ""
    """What the bytes of its KV blocks depend on, where others might have them: engines of which this is equal can use
    each other's."""


class StartUpFailed(_Message):
    """There will be no engine; the process exits. The message is for the operator, not for clients."""

    message: str


class TokenLogprob(_Part):
    """One token's log-probability at one position."""

    token_id: int
    logprob: float
    rank: int | None
    text: str | None


PositionLogprobs = list[TokenLogprob]
"""The chosen (or given) token first, then the most likely ones in order."""


class RequestTimings(_Part):
    """Where a request's time went, in seconds, and what it went through."""

    queue_s: float = 0.0
    """From arrival in the engine to the first step that computed one of its tokens."""
    prefill_s: float = 0.0
    """From there to its first output token."""
    decode_s: float = 0.0
    """From there to its last."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class Delta(_Part):
    """What is new for one completion of a request."""

    request_id: str
    index: int = 0
    """Which of the request's `n` completions."""
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token of `token_ids`; None unless asked for."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error": this completion has ended."""
    stop_reason: int | str | None = None
    error: str | None = None
    """With finish_reason "error": what to tell the client."""
    is_last: bool = False
    """Nothing follows for this request: all its completions have ended."""
    timings: RequestTimings | None = None
    """On the last delta."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """On the first delta, if asked for: one entry per prompt token, the first of them None."""
    error_status: int = 500
    """With an error: the HTTP status it stands for. 400 says that the request itself was refused."""
    error_param: str | None = None
    """With an error: the field of the request at fault, if one is."""
    progress: SilentProgress | None = None
    """Comes alone: nothing is new for any completion. The tokens of the completions that follow have been counted."""
    cumulative_logprob: float | None = None
    """Of a completion that was compared with others by it."""
    embedding: bytes | None = None
    """On the last delta, if asked for: the vector of the prompt, as float32."""


class StepBatch(_Message):
    """The outcome of one step. Without deltas: only numbers."""

    deltas: list[Delta]
    stats: EngineStats
    begun: list[str] = []
    """Requests that have entered the batch for the first time; those with deltas need not be here."""


class SnapshotRow(_Part):
    """One request's part in a step."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens it had in the cache before the step."""
    num_output_tokens: int
    """Tokens it had generated before the step."""
    num_tokens: int
    """Tokens computed for it in the step."""
    num_blocks: int
    is_decode: bool
    num_cached_tokens: int = 0
    """If it entered the batch with this step: how many of its tokens were in the cache by then."""
    num_drafts: int = 0
    num_accepted: int = 0
    """Of the tokens computed, guesses; and of these, right ones."""


class WaitingRow(_Part):
    """A request in the queue."""

    request_id: str
    num_tokens: int
    """What it has to compute when it is its turn: its prompt, and its output if it was preempted."""


CACHED, SHARED = -1, -2
"""Owners of blocks that no request holds and the prefix cache keeps, and of blocks that several requests hold."""


class BlockRun(_Part):
    """Neighbouring blocks with the same owner."""

    owner: int | None
    """Index into `BlockMap.owners`, or `CACHED` or `SHARED`; None: free."""
    num_blocks: int


class BlockMap(_Part):
    """Who owns which KV block, run-length coded in the order of the block ids."""

    owners: list[str]
    """Request ids."""
    runs: list[BlockRun]


class StepSnapshot(_Message):
    """One step in full. Sent only while it is watched."""

    step_id: int
    step_s: float
    kind: StepKind
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_used_slots: int
    rows: list[SnapshotRow]
    """Requests that computed something in the step."""
    waiting: list[WaitingRow]
    """The first few of the queue, in the order in which they are going to be admitted."""
    preempted: list[str]
    finished: list[str]
    blocks: BlockMap | None
    """None on steps that follow another map too closely."""


class BlockSnapshot(_Message):
    """The blocks between two steps: for who has just begun to watch, and when the engine comes to rest."""

    blocks: BlockMap


class CacheNews(_Message):
    """How the prefix cache has changed: `core.kv.cache_report.CacheReport`. It comes before the tokens of the step that
    changed it."""

    number: int
    stored: list[bytes]
    evicted: list[bytes]
    is_whole: bool


class Heartbeat(_Message):
    """The process lives. It comes from a thread of its own, so that a long step does not hold it up."""

    turn_s: float = 0.0
    """For how long the loop has been in its present turn: taking messages and making a step. 0 while it waits."""


Snapshot = StepSnapshot | BlockSnapshot
FromEngine = EngineReady | StartUpFailed | StepBatch | Snapshot | CacheNews | Heartbeat

# ---- their packed form ----------------------------------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode
"""Any message → bytes. Raises for text that is no valid Unicode and for integers beyond 64 bits."""
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
"""Bytes → a message. `msgspec.DecodeError`, of which `ValidationError` is one, says what is wrong with it."""
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode


class UnreadableRequest(msgspec.Struct, frozen=True):
    """Stands for an `AddRequest` that has a request id and is wrong otherwise. It is made here and never travels."""

    request_id: str
    message: str
    param: str | None = None


def decode_to_engine(payload: bytes | memoryview) -> ToEngine | UnreadableRequest:
    """Bytes → a message; as `decode_from_engine`, but a request with a wrong field is not an error of the front end's
    other requests."""
    try:
        return _decode_to_engine(payload)
    except msgspec.ValidationError as error:
        fields = msgspec.msgpack.decode(payload)
        is_request = isinstance(fields, list) and len(fields) > 1 and fields[0] == AddRequest.__name__
        if not is_request or not isinstance(fields[1], str):
            raise
        cause = error.__cause__
        param = cause.param if isinstance(cause, InvalidRequestError) else None
        return UnreadableRequest(fields[1], str(error), param)
