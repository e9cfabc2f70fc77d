"""Beam searches as requests (see `headway.engine.beam_search` for what a search decides).

To the scheduler a live beam is a request of its own for a single token: the prompt is the beam's tokens, and what comes
back are the logprobs of the most likely next ones. When all beams of a search have come back, it chooses, and the
chosen ones are queued:

    position    1             2                 3
    requests    P ──────┬──── P a ────┬──────── P a c          the blocks of P are in all tables, those of P a in two;
                        └──── P b     └──────── P a d          P b has fallen out, and its blocks are cache

Forks cost no memory of their own, because the prefix cache shares full blocks and copies the last one. Without it, or
where blocks had to be evicted meanwhile, a beam computes its tokens again, and the result is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.core import NewRequest, Request, RequestStatus, RequestUpdate, SchedulerOutput, TokenLogprobs
from headway.core.request_options import RequestOptions
from headway.engine.beam_search import Beam, BeamRules, BeamSearch
from headway.engine.detokenizer import IncrementalDetokenizer
from headway.engine.request_preparer import PreparedRequest, core_id
from headway.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SilentProgress
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer


class BeamRequest(Request):
    """A beam as the scheduler sees it. The next one in its place is shown as the same request, which goes on."""

    __slots__ = ("_num_found_tokens", "_shown_as")

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        search: _LiveSearch,
        place: int,
        parent: BeamRequest | None,
        options: RequestOptions,
        sampling_params: SamplingParams,
    ) -> None:
        """`place`: among the live beams of its position. `parent`: the beam whose tokens it has, and one more. What is
        known of their blocks is the same, and the search stands in the queue where the parent stood, not behind
        requests that came meanwhile."""
        super().__init__(
            request_id,
            token_ids,
            max_tokens=1,
            is_beam=True,
            fork_of=parent,
            options=options,
            sampling_params=sampling_params,
        )
        self._shown_as = f"{search.request_id}#{place}"
        self._num_found_tokens = self.num_prompt_tokens - search.num_prompt_tokens

    @property
    def shown_as(self) -> str:
        """The search, and the beam's place in it."""
        return self._shown_as

    @property
    def num_inherited_tokens(self) -> int:
        """What the search has found; the others are its prompt."""
        return self._num_found_tokens


@dataclass(slots=True)
class BeamLookups:
    """What beams that go on have looked up in the prefix cache, and found: their own tokens, one position before."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class SearchedStep:
    """What a step's result means for the searches."""

    others: list[RequestUpdate]
    """Updates of requests that are no beams."""
    outputs: list[RequestOutput] = field(default_factory=list)
    new_beams: list[Request] = field(default_factory=list)
    """To be queued."""
    dropped_request_ids: list[str] = field(default_factory=list)
    """Beams of searches that have failed; the scheduler still has them."""
    errors: dict[str, str] = field(default_factory=dict)
    progress: dict[str, SilentProgress] = field(default_factory=dict)
    """By request id."""


class BeamRequests:
    """Follows all live searches. Their beams belong to the scheduler, which is told by id what to end."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._live: dict[str, _LiveSearch] = {}
        self._owner: dict[str, _LiveSearch] = {}  # by the id of a beam
        self._lookups = BeamLookups()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def num_between_steps(self) -> int:
        """Beams that go on and are queued for the next step. They are in the queue between any two steps."""
        return sum(search.num_between_steps for search in self._live.values())

    def take_lookups(self) -> BeamLookups:
        """What beams that go on have looked up since this was last asked."""
        taken, self._lookups = self._lookups, BeamLookups()
        return taken

    def shown(self) -> frozenset[str]:
        """What all live beams are shown as."""
        return frozenset(beam.shown_as for search in self._live.values() for beam in search.beams)

    def add(self, request: PreparedRequest, *, now_s: float) -> Request:
        """Start to search. Returns the first beam, to be queued."""
        search = _LiveSearch(request, vocab_size=self._vocab_size, arrival_time_s=now_s)
        self._live[request.request_id] = search
        self._follow(search)
        return search.beams[0]

    def abort(self, request_id: str, *, now_s: float) -> tuple[RequestOutput, list[str]]:
        """End a search. Returns the best it had, and its beams that the scheduler still has."""
        search = self._live[request_id]
        self._forget(search)
        return search.output(self._tokenizer, now_s, unfinished="abort"), search.awaited_ids()

    def forget_all(self) -> None:
        """Follow no search any more, and tell nothing of it."""
        self._live.clear()
        self._owner.clear()

    def note_launched(self, output: SchedulerOutput, *, now_s: float) -> list[str]:
        """A step has been launched; beams may be in it. Returns which searches have begun with it."""
        begun = []
        for new in output.new_requests:
            search = self._owner.get(new.request_id)
            if search is not None:
                if search.has_begun:
                    self._lookups.num_queried_tokens += len(new.prompt_token_ids) + len(new.output_token_ids)
                    self._lookups.num_hit_tokens += new.num_computed_tokens
                if search.note_scheduled(new, now_s):
                    begun.append(search.request_id)
        return begun

    def process(self, updates: Sequence[RequestUpdate], *, now_s: float) -> SearchedStep:
        """Take in a step's result: searches whose beams have all come back go on or end."""
        step = SearchedStep(others=[])
        changed: dict[_LiveSearch, None] = {}
        for update in updates:
            search = self._owner.get(update.request_id)
            if search is None:
                step.others.append(update)
            else:
                search.take(update)
                changed[search] = None
        for search in changed:
            if search.error is not None:
                self._fail(search, step, now_s)
            elif search.is_complete:
                self._advance(search, step, now_s)
        return step

    def _advance(self, search: _LiveSearch, step: SearchedStep, now_s: float) -> None:
        self._unfollow(search)
        step.progress[search.request_id] = search.advance(now_s)
        self._follow(search)
        step.new_beams += search.beams
        if search.is_finished:
            self._forget(search)
            step.outputs.append(search.output(self._tokenizer, now_s))

    def _fail(self, search: _LiveSearch, step: SearchedStep, now_s: float) -> None:
        self._forget(search)
        assert search.error is not None
        step.errors[search.request_id] = search.error
        step.dropped_request_ids += search.awaited_ids()
        step.outputs.append(search.output(self._tokenizer, now_s, unfinished="error"))

    def _follow(self, search: _LiveSearch) -> None:
        for beam in search.beams:
            self._owner[beam.request_id] = search

    def _forget(self, search: _LiveSearch) -> None:
        del self._live[search.request_id]
        self._unfollow(search)

    def _unfollow(self, search: _LiveSearch) -> None:
        for beam in search.beams:
            del self._owner[beam.request_id]


class _LiveSearch:
    """One request, from its arrival until its search is over."""

    def __init__(self, request: PreparedRequest, *, vocab_size: int, arrival_time_s: float) -> None:
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.error: str | None = None
        self._request = request
        self._template = request.children[0]
        # The prompt's blocks are pinned once, by the first beam.
        self._later_options = dataclasses.replace(self._template.options, cache_ttl_s=0.0)
        self._search = BeamSearch(_rules(request.params, self._template))
        num_top = min(self._search.rules.num_top, vocab_size)
        self._beam_params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_top, detokenize=False)
        self._num_ids = 0
        self._found: dict[str, TokenLogprobs] = {}
        self._metrics = RequestMetrics(arrival_time_s)
        self._num_cached_tokens = 0
        self.beams = [self._beam(self._template.prompt_token_ids, 0, None)]
        """The requests of the search's live beams, in the same order."""
        self._awaited = {beam.request_id for beam in self.beams}

    @property
    def is_finished(self) -> bool:
        return not self._search.live

    @property
    def has_begun(self) -> bool:
        """Whether it is past its first position."""
        return self._metrics.first_token_s is not None

    @property
    def num_between_steps(self) -> int:
        """Its beams that go on and wait for the next step, without those that were preempted."""
        return sum(beam.status is RequestStatus.WAITING for beam in self.beams) if self.has_begun else 0

    @property
    def is_complete(self) -> bool:
        """Whether all beams have come back."""
        return not self._awaited

    def awaited_ids(self) -> list[str]:
        """Beams that have not come back, in their order."""
        return [beam.request_id for beam in self.beams if beam.request_id in self._awaited]

    def note_scheduled(self, new: NewRequest, now_s: float) -> bool:
        """One of its beams enters the batch; only the first time counts. Returns whether it was."""
        if self._metrics.first_scheduled_s is not None:
            return False
        self._metrics = dataclasses.replace(self._metrics, first_scheduled_s=now_s)
        self._num_cached_tokens = new.num_computed_tokens
        return True

    def take(self, update: RequestUpdate) -> None:
        """A beam has come back, with logprobs or with what went wrong."""
        self._awaited.discard(update.request_id)
        if update.error is not None:
            self.error = update.error
        elif not update.logprobs:
            self.error = "the executor returned no logprobs for a beam"
        else:
            self._found[update.request_id] = update.logprobs[0]

    def advance(self, now_s: float) -> SilentProgress:
        """All beams have come back: choose those that go on."""
        num_started = 0 if self.has_begun else self._search.rules.width
        num_tokens_before = self._search.num_tokens
        self._search.advance([self._found[beam.request_id] for beam in self.beams])
        num_preemptions = self._metrics.num_preemptions + sum(beam.num_preemptions for beam in self.beams)
        first_token_s = now_s if self._metrics.first_token_s is None else self._metrics.first_token_s
        self._metrics = dataclasses.replace(self._metrics, first_token_s=first_token_s, num_preemptions=num_preemptions)
        self._found = {}
        parents = self.beams
        self.beams = [
            self._beam((*parents[beam.parent].prompt_token_ids, beam.token_ids[-1]), place, parents[beam.parent])
            for place, beam in enumerate(self._search.live)
        ]
        self._awaited = {beam.request_id for beam in self.beams}
        return SilentProgress(num_started, self._search.num_tokens - num_tokens_before)

    def output(
        self, tokenizer: Tokenizer | None, now_s: float, *, unfinished: FinishReason | None = None
    ) -> RequestOutput:
        """The sequences found; those that have not ended are given this reason. After a failure it is them who tell."""
        count = self._request.params.n
        best = self._search.live[:count] if unfinished == "error" else self._search.best(count)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            prompt_logprobs=None,
            outputs=[self._completion(index, beam, tokenizer, unfinished) for index, beam in enumerate(best)],
            finished=True,
            num_cached_tokens=self._num_cached_tokens,
            metrics=dataclasses.replace(self._metrics, finished_s=now_s),
        )

    def _beam(self, token_ids: tuple[int, ...], place: int, parent: BeamRequest | None) -> BeamRequest:
        self._num_ids += 1
        return BeamRequest(
            core_id(self.request_id, self._num_ids - 1),
            token_ids,
            search=self,
            place=place,
            parent=parent,
            options=self._template.options if parent is None else self._later_options,
            sampling_params=self._beam_params,
        )

    def _completion(
        self, index: int, beam: Beam, tokenizer: Tokenizer | None, unfinished: FinishReason | None
    ) -> CompletionOutput:
        stop_reason = None
        if beam.ending == "stop" and (tokenizer is None or beam.token_ids[-1] not in tokenizer.eos_token_ids):
            stop_reason = beam.token_ids[-1]
        return CompletionOutput(
            index=index,
            text=self._text(beam, tokenizer),
            token_ids=list(beam.token_ids),
            cumulative_logprob=beam.cum_logprob,
            finish_reason=beam.ending or unfinished,
            stop_reason=stop_reason,
        )

    def _text(self, beam: Beam, tokenizer: Tokenizer | None) -> str:
        """A stop token ends the text and is not part of it, unless the request wants it to be."""
        params = self._request.params
        if tokenizer is None or not params.detokenize:
            return ""
        is_cut = beam.ending == "stop" and not params.include_stop_str_in_output
        detokenizer = IncrementalDetokenizer(tokenizer, self._request.prompt_token_ids, params.skip_special_tokens)
        detokenizer.append(beam.token_ids[:-1] if is_cut else beam.token_ids)
        detokenizer.finish()
        return detokenizer.text


def _rules(params: SamplingParams, template: Request) -> BeamRules:
    assert params.max_tokens is not None
    return BeamRules(
        width=params.num_choices,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=template.stop_token_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
