"""Decides which prompts are computed on prefill replicas, and follows those.

    request ──► router ──► replica that answers ◄── blocks ── prefill replica ◄── the prompt, as a request for one token
                                └──► deltas

Both replicas get the prompt at once, and blocks travel as they are computed. The request does not depend on them: if
the prefill replica fails, the one that answers computes the missing blocks itself.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.core.fetching import FETCH_LIMIT_S
from headway.core.kv.blocks import block_digests, root_digest
from headway.core.request_options import RequestOptions
from headway.errors import InvalidRequestError
from headway.front.remote_engine import RemoteEngine
from headway.front.roles import PrefillChoice, computes_elsewhere
from headway.front.router import Router
from headway.sampling_params import SamplingParams
from headway.wire.messages import AddRequest, Delta

SLOW_PREFILL = 4.0
"""A prefill is given up after this multiple of its expected time."""
LEAST_PREFILL_S = 10.0
"""A prefill is not given up before this time."""
MOST_PREFILL_S = FETCH_LIMIT_S
"""A prefill is given up after this time in any case, as on the replica that answers. This is also the limit if nothing
is known about the time of a prefill."""
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

Outcome = Literal["elsewhere", "here", "failed", "aborted"]
"""elsewhere: a prefill replica computed the prompt · here: that was not worth it · failed: a prefill replica began it
but did not finish · aborted: the client left meanwhile."""


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that a prefill replica computes."""

    prefill_id: str
    """The id of the request for one token."""
    request_id: str
    """The id of the request whose prompt it is."""
    engine: RemoteEngine
    until_s: float
    """The time at which it is given up."""


class Prefills:
    """Chooses where prompts are computed, and follows those that a prefill replica computes. Without prefill replicas
    (`engines`) every prompt is computed where the request is answered."""

    def __init__(
        self, engines: Sequence[RemoteEngine], *, router: Router, answering: Router, now: Callable[[], float]
    ) -> None:
        """`router` chooses among `engines`, the prefill replicas; `answering` chooses among the replicas that
        answer."""
        self.router = router
        self._answering = answering
        self._engines = {engine.place: engine for engine in engines}
        self._now = now
        self._num_by_outcome: dict[Outcome, int] = {"elsewhere": 0, "here": 0, "failed": 0, "aborted": 0}
        self._live: dict[str, _Prefill] = {}  # by their own ids
        self._by_request: dict[str, _Prefill] = {}
        self._sources: dict[str, str] = {}  # of open requests: where their blocks come from, "" if computed there
        self._ids = itertools.count()
        self._prefix = f"#prefill-{secrets.token_hex(4)}-"  # other front ends of the same engines have others

    @property
    def engines(self) -> Collection[RemoteEngine]:
        """The prefill replicas."""
        return self._engines.values()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many prompts were computed where, by outcome. Empty without prefill replicas."""
        return dict(self._num_by_outcome.items()) if self._engines else {}

    @property
    def num_live(self) -> int:
        """The number of prefills in progress."""
        return len(self._live)

    # ---- requests -------------------------------------------------------------------------------------------------

    def source_of(self, request: AddRequest, answering: RemoteEngine) -> str:
        """Return the address from which `answering`, the request's replica, can fetch the blocks of the prompt, or ""
        if there is none. May begin a prefill. For a request that was sent before, the result is the same as then,
        unless that source is gone."""
        if not self._engines:
            return ""
        source = self._sources.get(request.request_id)
        if source is None:
            source = self._sources[request.request_id] = self._begin(request, answering)
        return source

    def end(self, request_id: str, outcome: Outcome) -> None:
        """Stop a request's prefill, because the request has ended."""
        self._sources.pop(request_id, None)
        self._stop(request_id, outcome)

    def end_late(self) -> None:
        """Give up prefills that have taken too long."""
        now_s = self._now()
        for prefill in [prefill for prefill in self._live.values() if prefill.until_s < now_s]:
            self._stop(prefill.request_id, "failed")

    def _begin(self, request: AddRequest, answering: RemoteEngine) -> str:
        """Begin a prefill on one of the engines if that is better. Returns the source of its blocks, or ""."""
        info, params = answering.info, request.params
        assert info is not None and params is not None
        prompt, block_size = request.prompt_token_ids, info.block_size
        num_uncached = self._answering.num_uncached(request.request_id)
        num_whole = (len(prompt) - 1) // block_size  # the last token is computed where the answer is
        num_blocks = max(num_whole - (len(prompt) - num_uncached) // block_size, 0)
        needs_all = params.prompt_logprobs is not None or params.pooling is not None
        if needs_all or not num_blocks or not self.router.has_healthy:
            self._num_by_outcome["here"] += 1
            return ""
        prefill_id = f"{self._prefix}{next(self._ids)}"
        place = self.router.route(
            prefill_id,
            num_prompt_tokens=num_whole * block_size,
            num_answer_tokens=1,
            digests=functools.partial(digests_of, request, num_whole, block_size),
        )
        engine = self._engines[place]
        choice = self._choice(engine, answering, num_uncached=num_uncached, num_blocks=num_blocks)
        if engine.info is None or not computes_elsewhere(choice):
            self.router.end(prefill_id)
            self._num_by_outcome["here"] += 1
            return ""
        prefill = _Prefill(prefill_id, request.request_id, engine, self._now() + self._limit_s(choice, place))
        self._live[prefill_id] = self._by_request[request.request_id] = prefill
        try:
            engine.add(_message(prefill_id, request, num_whole * block_size))
        except InvalidRequestError:  # as it is going to be said of the request itself
            self._stop(request.request_id, "failed")
            return ""
        self._answering.note_elsewhere(request.request_id, len(prompt) - num_whole * block_size)
        return f"{engine.info.blocks_at}#{prefill_id}"

    def _choice(
        self, engine: RemoteEngine, answering: RemoteEngine, *, num_uncached: int, num_blocks: int
    ) -> PrefillChoice:
        here, there = answering.stats, engine.stats
        return PrefillChoice(
            num_uncached=num_uncached,
            # A beginning that is cached there counts as if its queue were shorter.
            num_queued_prefill=max(self.router.num_prompt_tokens(engine.place) - num_uncached, 0),
            num_queued_decode=self._answering.num_prompt_tokens(answering.place) - num_uncached,
            num_generating=self._answering.num_generating(answering.place),
            prefill_token_s=there.step.prompt_token_s or here.step.prompt_token_s,
            decode_token_s=here.step.prompt_token_s or there.step.prompt_token_s,
            transfer_s=here.transfers.block_s * num_blocks,
            num_blocks=num_blocks,
        )

    def _limit_s(self, choice: PrefillChoice, place: int) -> float:
        """The time limit for a prefill that has just been routed."""
        expected_s = SLOW_PREFILL * choice.prefill_token_s * self.router.num_prompt_tokens(place)
        return min(max(LEAST_PREFILL_S, expected_s), MOST_PREFILL_S) if expected_s else MOST_PREFILL_S

    def _stop(self, request_id: str, outcome: Outcome) -> None:
        prefill = self._by_request.get(request_id)
        if prefill is not None:
            self._note_end(prefill, outcome)
            prefill.engine.abort(prefill.prefill_id)

    def _note_end(self, prefill: _Prefill, outcome: Outcome) -> None:
        del self._live[prefill.prefill_id], self._by_request[prefill.request_id]
        self.router.end(prefill.prefill_id)
        self._num_by_outcome[outcome] += 1

    # ---- what the engines say -------------------------------------------------------------------------------------

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Handle deltas of prefills. Their tokens are ignored; only their ends count."""
        for delta in deltas:
            prefill = self._live.get(delta.request_id)
            if prefill is not None and delta.is_last:
                self._note_end(prefill, "elsewhere" if delta.error is None else "failed")

    def note_loss(self, engine: RemoteEngine) -> None:
        """Note that a prefill replica is gone. The replicas that answer notice themselves that no blocks arrive; here
        that source is removed, so that no request uses it again."""
        for prefill in [prefill for prefill in self._live.values() if prefill.engine is engine]:
            self._note_end(prefill, "failed")
        address = "" if engine.info is None else f"{engine.info.blocks_at}#"
        for request_id, source in self._sources.items():
            if address and source.startswith(address):
                self._sources[request_id] = ""


def digests_of(request: AddRequest, num_blocks: int, block_size: int) -> Sequence[bytes]:
    """The digests of the first blocks of a prompt."""
    tokens = tuple(request.prompt_token_ids[: num_blocks * block_size])
    return block_digests(root_digest(request.options.cache_salt), tokens, block_size)


def _message(prefill_id: str, request: AddRequest, num_tokens: int) -> AddRequest:
    """A request that computes the first `num_tokens` tokens of another request's prompt and one output token. Its
    purpose is the blocks that it leaves."""
    options = RequestOptions(
        priority=request.options.priority,
        tenant=request.options.tenant,
        ttft_target_s=request.options.ttft_target_s,
        cache_salt=request.options.cache_salt,
    )
    return AddRequest(prefill_id, request.prompt_token_ids[:num_tokens], _PARAMS, options)
