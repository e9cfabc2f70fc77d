"""The messages between the front end and the engine process: typed records, carried as msgpack (see `channel`).

Each direction has one union, and only its members travel as separate messages; every other record is a part of one of
them. All are packed as arrays without field names, because both ends always have the same version. The parts cannot
form reference cycles, so the garbage collector need not track them. `SamplingParams` and `RequestOptions` travel
unchanged; they validate themselves when they are unpacked.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.core.kv.cache_report import BlockContent
from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.errors import InvalidRequestError
from headway.outputs import Delivered, SilentProgress
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import EngineStats, StepKind

Role = Literal["prefill", "decode"]


class _Message(msgspec.Struct, tag=True, array_like=True):
    """A record that travels as a message. Its name is its tag."""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """A record inside a message."""


# ---- to the engine --------------------------------------------------------------------------------------------------


class BlockExchange(_Part):
    """An engine's part in the transfer of KV blocks from prefill engines to decode engines."""

    role: Role
    """prefill: this engine hands them out · decode: it fetches them."""
    folder: str = ""
    """A folder on this machine for sockets. Only this user may read it."""
    carrier: Literal["auto", "tcp"] = "auto"
    """auto: memory that the processes of one machine share · tcp: the network."""


class Start(_Message):
    """The first message: which engine to build."""

    options: dict[str, Any]
    """Flat options of `EngineConfig`. Another factory may accept others."""
    log_level: str = "INFO"
    counted: EngineStats | None = None
    """The last statistics of the engine that this one replaces. Its counters continue from there."""
    heartbeat_s: float = 1.0
    """The interval of heartbeats."""
    reports_cache: bool = False
    """Whether it reports the content of its prefix cache."""
    reports_tokens: bool = False
    """Whether these reports have the tokens of the blocks."""
    cores: list[int] = []
    """The cores that it may run on; empty: all."""
    blocks: BlockExchange | None = None
    """Its role and how blocks travel, where prefill and decode are divided."""


class AddRequest(_Message):
    """Queue a request. Its result, even a refusal, comes as deltas."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | None
    """None: those of the previous request. All prompts of an HTTP request have the same parameters, which may be larger
    than the prompts and are sent once. With `bad_words` they include the token ids of these, because the front end
    tokenises and the engine's loop should not."""
    options: RequestOptions = DEFAULT_OPTIONS
    delivered: list[Delivered] | None = None
    """For a request that continues from another engine: the delivered part of each completion."""


class AbortRequests(_Message):
    """Abort requests before the next step. No delta follows for them. Ids that are not live are ignored."""

    request_ids: list[str]


class Watch(_Message):
    """Turn snapshots on or off."""

    on: bool


class ReportCache(_Message):
    """Report the whole prefix cache again, because a report was missing."""


class ResetCache(_Message):
    """Forget all cached blocks that no request uses. `CacheResetDone` is the answer."""

    name: str
    """Names the reset. It has never been used before."""
    with_disk: bool = False
    """Whether the blocks on disk are deleted too."""


class Shutdown(_Message):
    """Refuse new requests, run the others for at most `drain_s` seconds, then exit."""

    drain_s: float


ToEngine = Start | AddRequest | AbortRequests | Watch | ReportCache | ResetCache | Shutdown


# ---- from the engine ------------------------------------------------------------------------------------------------


class EngineReady(_Message):
    """The engine takes requests. The fields describe it."""

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
    """The number of blocks that fit into host memory."""
    exit_s: float = 0.0
    """The seconds that the engine may need to store blocks when it ends."""
    hidden_size: int = 0
    """The length of the model's hidden states."""
    blocks_at: str = ""
    """The address of its block server, if it has one (see `block_server`)."""
    block_format: str = ""
    """A fingerprint of its KV blocks' format. Engines with equal fingerprints can use each other's blocks."""


class StartUpFailed(_Message):
    """The engine could not be built and the process exits. The message is for the operator, not for clients."""

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
    """The time that a request spent in each phase, in seconds, and other facts about its course."""

    queue_s: float = 0.0
    """From arrival in the engine to the first step that computed one of its tokens."""
    prefill_s: float = 0.0
    """From the end of the queue phase to its first output token."""
    decode_s: float = 0.0
    """From its first output token to its last."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class Delta(_Part):
    """What is new for one completion of a request."""

    request_id: str
    index: int = 0
    """The index among the request's `n` completions."""
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token of `token_ids`; None unless asked for."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error": this completion has ended."""
    stop_reason: int | str | None = None
    error: str | None = None
    """With finish_reason "error": the message for the client."""
    is_last: bool = False
    """Whether this is the request's last delta: all its completions have ended."""
    timings: RequestTimings | None = None
    """Set on the last delta only."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """On the first delta, if asked for: one entry per prompt token, the first of them None."""
    error_status: int = 500
    """With an error: its HTTP status. 400 means that the request itself was refused."""
    error_param: str | None = None
    """With an error: the field of the request at fault, if any."""
    progress: SilentProgress | None = None
    """Progress without output. Such a delta has nothing new for any completion. The tokens of the completions that
    follow later are already counted here."""
    cumulative_logprob: float | None = None
    """Set for a completion that was compared with others by this sum."""
    embedding: bytes | None = None
    """On the last delta, if asked for: the vector of the prompt, as float32."""


class RequestForecast(_Part):
    """What an engine expects of a request that it has just queued, in seconds from then on."""

    request_id: str
    first_token_s: float
    total_s: float | None = None
    """Until its last token; None if nothing is known about the length of its answer."""


class StepBatch(_Message):
    """The outcome of one step. Without deltas it only carries statistics and forecasts."""

    deltas: list[Delta]
    stats: EngineStats
    begun: list[str] = []
    """Requests that have entered the batch for the first time. Those with deltas may be missing."""
    forecasts: list[RequestForecast] = []
    """Of requests that were queued since the last message."""


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
    """If it entered the batch with this step, the number of its tokens found in the cache; otherwise 0."""
    num_drafts: int = 0
    num_accepted: int = 0
    """`num_drafts`: draft tokens among those computed; `num_accepted`: draft tokens that were accepted."""


class WaitingRow(_Part):
    """A request in the queue."""

    request_id: str
    num_tokens: int
    """The tokens that it has to compute: its prompt, and its output if it was preempted."""


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
    """The first few requests of the queue, in the order of their admission."""
    preempted: list[str]
    finished: list[str]
    blocks: BlockMap | None
    """None if the previous map was made too short a time ago."""


class BlockSnapshot(_Message):
    """The blocks between two steps, sent to a new viewer and when the engine becomes idle."""

    blocks: BlockMap


class CacheNews(_Message):
    """Changes of the prefix cache, as in `core.kv.cache_report.CacheReport`. They are sent before the tokens of the
    step that made them."""

    number: int
    stored: list[bytes]
    evicted: list[bytes]
    is_whole: bool
    contents: list[BlockContent] = []
    """What each block of `stored` holds, if the front end asked for tokens."""


class CacheResetDone(_Message):
    """The cache has been reset. Front ends that share the engine all get this message."""

    name: str
    """The name of the `ResetCache`."""
    num_forgotten: int
    """Blocks that were forgotten, on the device and in host memory."""
    num_kept: int
    """Blocks that stay cached, because requests use them or wait for them."""


class Heartbeat(_Message):
    """A sign of life. A separate thread sends it, so that a long step does not delay it."""

    turn_s: float = 0.0
    """How long the loop has been in its present turn, which handles messages and makes a step. 0 while it waits."""


Snapshot = StepSnapshot | BlockSnapshot
FromEngine = EngineReady | StartUpFailed | StepBatch | Snapshot | CacheNews | CacheResetDone | Heartbeat

# ---- their packed form ----------------------------------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode
"""Any message → bytes. Raises for text that is no valid Unicode and for integers beyond 64 bits."""
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
"""Bytes → a message. `msgspec.DecodeError`, of which `ValidationError` is one, says what is wrong with it."""
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode


class UnreadableRequest(msgspec.Struct, frozen=True):
    """Stands for an invalid `AddRequest` whose request id could be read. It is made by the receiver and never
    travels."""

    request_id: str
    message: str
    param: str | None = None


def decode_to_engine(payload: bytes | memoryview) -> ToEngine | UnreadableRequest:
    """Decode a message like `decode_from_engine`, but return an `UnreadableRequest` for a request with an invalid
    field, which must not affect other requests."""
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
