"""Fixed limits on what clients may send and hold, in bytes, counts and seconds.

All input is limited before it takes memory, or time of the event loop that all clients share. Limits that an operator
may want to change are options (`headway.server.server_config`); the others are here. None of them is tuned:
well-behaved clients do not reach them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server."""

    # ---- connections
    max_open_files: int = 65536
    """Most open files that the server asks the system for. Each connection is an open file and takes some memory."""
    reserved_files: int = 128
    """Open files reserved for other uses than connections: the engine's channel, model files, and closing files."""
    listen_backlog: int = 4096
    """Connections that may wait to be accepted."""
    keep_alive_s: int = 75
    """How long a connection may stay open without a request."""
    max_pipelined: int = 8
    """Pipelined requests on one connection, in addition to the one that is being answered."""
    linger_s: float = 2.0
    """How long a client may still send a body after its request was answered, so that it can then read the answer."""
    app_first_s: float = 1.0
    """The route refuses a body that is too slow. This much later, the connection is closed in any case."""

    # ---- bodies
    bodies_at_once: int = 32
    """Bodies of the largest size that may be incomplete at once. Smaller bodies may be more."""
    read_ahead_bytes: int = 512 * 2**10
    """Bytes that may have been read beyond a body's limit when its route refuses it: 64 KiB and two reads."""
    body_per_framing: int = 8
    """Least ratio of a body's bytes to the bytes of its framing. Small chunks take time of the event loop."""
    part_bytes: int = 2**18
    """Bytes that the event loop parses without a pause. Larger bodies are parsed one after another, with pauses."""
    max_values: int = 2**19
    """Commas in a body. This many take a tenth of a second to parse, in which the event loop does nothing else. Commas
    in texts count too, but no context has room for this many."""
    max_nested: int = 2**16
    """Opening brackets in a body, for the same reason."""
    skip_s: float = 2.0
    """How long the rest of a refused request's body is read."""

    # ---- prompts
    max_chars_per_token: int = 32
    """Characters of a text per token of the context; also token ids to decode per token of the context. Text has 3 to 5
    characters per token. Only long runs of one character have more than 32."""
    item_chars: int = 64
    """Characters that each message or text counts for in addition to its length, because templates loop over them."""
    max_messages: int = 16_384
    """Messages of a conversation, including their parts and calls."""

    # ---- what a request asks for
    max_stop_strings: int = 64
    """Strings in `stop`."""
    max_stop_chars: int = 1024
    """Characters of one stop string or one bad word."""
    max_all_chars: int = 8192
    """Characters of all stop strings together, and of all bad words."""
    max_list_items: int = 1024
    """Entries of `bad_words`, `stop_token_ids` and `logit_bias`."""
    max_top_logprobs: int = 20
    """Alternatives for each token."""
    max_prompt_logprobs: int = 2**18
    """Log-probabilities of prompts in one answer. More would block the engine's loop for too long."""
    max_beams: int = 64
    """Beams of a search, and its `stop_token_ids`. Ranking the continuations of 64 beams blocks the engine for 5 ms."""
    max_target_ms: float = 86_400_000.0
    """Largest target of a request: a day."""
    max_priority: int = 2**31
    """Priorities of requests and classes are smaller than this and larger than its negative."""
    max_user_chars: int = 256
    """Characters of a user's name."""
    max_salt_chars: int = 256
    """Characters of `cache_salt`."""
    max_cache_ttl_s: float = 86_400.0
    """Longest time that a prompt's blocks can be pinned: a day."""

    # ---- schemas, grammars and tools that are being prepared
    max_waiting_jobs: int = 512
    """Queued and running jobs of all clients."""
    max_waiting_jobs_of_one: int = 64
    """Queued and running jobs of one client."""
    max_kept_shapes: int = 512
    """Cached results, for requests that ask for the same."""
    max_kept_shape_bytes: int = 32 * 2**20
    """Total encoded size of these results, in bytes."""

    # ---- streams and viewers
    deltas_at_once: int = 128
    """Deltas of an answer that are written in one turn. After a slow read, a client gets the rest in further turns."""
    quiet_s: float = 15.0
    """A stream with nothing to send gets a comment after this time, which keeps proxies from closing it and reveals
    clients that have left."""
    max_followers: int = 64
    """Clients that follow `/v1/kv_events`. Sending every change to each of them takes time of the event loop."""
    max_viewers: int = 64
    """Open live pages. Sending every frame to each of them takes time of the event loop."""
    max_queued_events: int = 8
    """Unread frames of a viewer; older ones are dropped."""
    max_special_tokens: int = 1024
    """Special tokens in one answer of `/tokenizer_info`."""
    max_queued_log_lines: int = 10_000
    """Unwritten lines of the access log; further ones are dropped."""
    max_samples: int = 20_000
    """Latencies kept for a minute's percentiles. At thousands of tokens per second the window becomes shorter."""


LIMITS = Limits()
