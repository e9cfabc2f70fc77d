"""The bounds of what clients send and hold: bytes, counts and seconds.

Everything that comes from outside is bounded before it takes memory, or time of the event loop that all clients share.
Bounds that an operator may want otherwise are options (`headway.server.server_config`), the others are here. None of
them is tuned: a client that means well does not meet them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server."""

    # ---- connections
    max_open_files: int = 65536
    """The most that is asked of the system. Each connection is an open file, and takes some memory too."""
    reserved_files: int = 128
    """Open files that are no connections: the engine's channel, model files, and those that are just being closed."""
    listen_backlog: int = 4096
    """Connections that have not been accepted."""
    keep_alive_s: int = 75
    """How long a connection may stay open without a request."""
    max_pipelined: int = 8
    """Requests on one connection, after the one that is being answered."""
    linger_s: float = 2.0
    """How long a client may go on with a body whose request is answered, so that it gets to read the answer."""
    app_first_s: float = 1.0
    """A body that is too slow is refused by the route that reads it. So much later the connection is closed anyhow."""

    # ---- bodies
    bodies_at_once: int = 32
    """Bodies of the largest size that may be on their way in; of smaller ones there may be more."""
    read_ahead_bytes: int = 512 * 2**10
    """What may have been read of a body when the route that reads it finds it too large: 64 KiB and two reads."""
    body_per_framing: int = 8
    """How many times the bytes of its framing a body must have. Small chunks take the event loop's time."""
    part_bytes: int = 2**18
    """What the event loop looks at in one go. Larger bodies are parsed one after another, and it turns in between."""
    max_values: int = 2**19
    """Commas in a body: a tenth of a second of parsing, in which the event loop does nothing else. Those in texts count
    too; no context has room for as many of them."""
    max_nested: int = 2**16
    """Opening brackets in a body, likewise."""
    skip_s: float = 2.0
    """How long the rest of a body is read whose request has been refused."""

    # ---- prompts
    max_chars_per_token: int = 32
    """Characters of a text for each token of the context; for a list of token ids likewise. Text has 3 to 5 characters
    per token. What has more than 32 is made of long runs of one character."""
    item_chars: int = 64
    """What a message, or one of several texts, counts for by itself: a template loops over messages."""
    max_messages: int = 16_384
    """Messages of a conversation, their parts and their calls, together."""

    # ---- what a request asks for
    max_stop_strings: int = 64
    """Strings in `stop`."""
    max_stop_chars: int = 1024
    """Characters of one stop string, or of one of the bad words."""
    max_all_chars: int = 8192
    """Characters of all stop strings together, and of all bad words."""
    max_list_items: int = 1024
    """Entries of `bad_words`, `stop_token_ids` and `logit_bias`."""
    max_top_logprobs: int = 20
    """Alternatives for each token."""
    max_prompt_logprobs: int = 2**18
    """Log-probabilities of prompts in one answer: more would take the engine's loop longer than others should wait."""
    max_beams: int = 64
    """Beams of a search, and its `stop_token_ids`. To rank the continuations of 64 takes 5 ms, in which all wait."""
    max_target_ms: float = 86_400_000.0
    """A target for a request's times: a day."""
    max_priority: int = 2**31
    """Priorities are smaller than this and larger than its opposite, those of classes too."""
    max_user_chars: int = 256
    """Characters of a user's name."""
    max_salt_chars: int = 256
    """Characters of `cache_salt`."""
    max_cache_ttl_s: float = 86_400.0
    """How long a prompt's blocks can be pinned: a day."""

    # ---- schemas, grammars and tools that are being prepared
    max_waiting_jobs: int = 512
    """Jobs of all clients that wait or are in work."""
    max_waiting_jobs_of_one: int = 64
    """Jobs of one client."""
    max_kept_shapes: int = 512
    """Results that are kept for requests that ask for the same."""
    max_kept_shape_bytes: int = 32 * 2**20
    """Bytes of what these results were made from."""

    # ---- streams, and who watches
    deltas_at_once: int = 128
    """Pieces of an answer that are written at once. A client that was slow to read gets the rest in the next turns."""
    quiet_s: float = 15.0
    """A stream with nothing to send gets a comment after this time. So proxies keep it, and clients that left show."""
    max_followers: int = 64
    """Clients that read `/v1/kv_events`. Each is sent every change, in the time of the event loop."""
    max_viewers: int = 64
    """Pages that are open. Each is sent every frame, in the time of the event loop."""
    max_queued_events: int = 8
    """Frames that a viewer has not read; older ones are dropped."""
    max_special_tokens: int = 1024
    """Special tokens of a vocabulary, in one answer."""
    max_queued_log_lines: int = 10_000
    """Lines of the access log that are not written yet; further ones are dropped."""
    max_samples: int = 20_000
    """Latencies that are kept for a minute's percentiles. At thousands of tokens a second the window gets shorter."""


LIMITS = Limits()
