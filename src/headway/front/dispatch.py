"""Sends each request to a replica that answers it, and its prompt to a prefill replica if that is better."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import msgspec

from headway.errors import InvalidRequestError
from headway.front.prefills import Outcome, Prefills, digests_of
from headway.front.remote_engine import RemoteEngine
from headway.front.router import Router, expected_tokens
from headway.wire.messages import AddRequest


class Dispatch:
    """Sends requests to engines and keeps the router's counts."""

    def __init__(self, engines: Sequence[RemoteEngine], *, router: Router, prefills: Prefills) -> None:
        """`engines` are the replicas that answer requests; `router` chooses among them."""
        self._engines = {engine.place: engine for engine in engines}
        self._router = router
        self._prefills = prefills
        self.counts = len(engines) > 1 or bool(prefills.engines)
        """Whether there is a choice to make, for which requests have to be counted."""
        self.note_tokens = router.note_tokens
        """To be called for each delta if `counts` is set."""

    @property
    def is_possible(self) -> bool:
        """Whether an engine takes requests."""
        return any(engine.is_ready for engine in self._engines.values())

    def send(self, request: AddRequest) -> RemoteEngine:
        """Send a request to the best engine and return that. Raises `InvalidRequestError` if it does not fit into a
        message."""
        if self.counts:
            engine = self._engines[self._route(request)]
            source = self._prefills.source_of(request, engine)
        else:
            (engine,), source = self._engines.values(), ""
        if request.options.blocks_at != source:  # clients may not say where to fetch something from
            options = dataclasses.replace(request.options, blocks_at=source)
            request = msgspec.structs.replace(request, options=options)
        try:
            engine.add(request)
        except InvalidRequestError:
            self.end(request.request_id)
            raise
        return engine

    def _route(self, request: AddRequest) -> int:
        info = next(engine.info for engine in self._engines.values() if engine.info is not None)
        assert info is not None and request.params is not None
        prompt = request.prompt_token_ids
        max_tokens = request.params.max_tokens or info.max_model_len - len(prompt)
        num_delivered = sum(len(each.token_ids) for each in request.delivered or ())
        num_answer = request.params.n * expected_tokens(max_tokens, request.options.predicted_tokens) - num_delivered
        return self._router.route(
            request.request_id,
            num_prompt_tokens=len(prompt) + num_delivered,
            num_answer_tokens=max(num_answer, 1),
            digests=functools.partial(digests_of, request, len(prompt) // info.block_size, info.block_size),
        )

    def note_leaving(self, engine: RemoteEngine) -> None:
        """Note that a process shuts down on its own initiative and refuses requests."""
        engine.is_leaving = True
        self._router.suspend(engine.place, True)

    def withdraw(self, request_id: str) -> None:
        """Note that a request's engine no longer has it, before it is sent to another one."""
        self._router.end(request_id)

    def end(self, request_id: str, outcome: Outcome = "failed") -> None:
        """Note that a request has ended. `outcome` applies to its prompt, if that is still being computed elsewhere."""
        self._prefills.end(request_id, outcome)
        self._router.end(request_id)
