"""Runs beam searches as requests (`headway.engine.beam_search` has the decisions of a search).

To the scheduler a live beam is a separate request for a single token. Its prompt is the beam's tokens, and its result
is the logprobs of the most likely next tokens. When all beams of a search have returned, the search chooses the next
beams, which are queued:

    position    1             2                 3
    requests    P ──────┬──── P a ────┬──────── P a c          the blocks of P are in all tables, those of P a in two;
                        └──── P b     └──────── P a d          P b has fallen out, and its blocks are cache

Forks need no extra memory for the tokens that they share, because the prefix cache shares full blocks and copies the
last one. Without the cache, or where blocks were evicted meanwhile, a beam computes its tokens again, with the same
result.
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
    """A beam as the scheduler sees it. Its successors in the same place are displayed as one continuing request."""

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
        """`place`: its index among the live beams of its position. `parent`: the beam that it extends by one token. It
        shares what is known of the parent's blocks, and takes the parent's place in the queue, before requests that
        came later."""
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
        """The name that viewers see: the search's id and the beam's place in it."""
        return self._shown_as

    @property
    def num_inherited_tokens(self) -> int:
        """How many of its prompt tokens were found by the search; the others are the search's prompt."""
        return self._num_found_tokens


@dataclass(slots=True)
class BeamLookups:
    """Prefix cache lookups of beams after the first position. They look up the search's own tokens, so they are counted
    apart."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(slots=True)
class SearchedStep:
    """The effect of a step's result on the searches."""

    others: list[RequestUpdate]
    """Updates of requests that are not beams."""
    outputs: list[RequestOutput] = field(default_factory=list)
    new_beams: list[Request] = field(default_factory=list)
    """The beams to queue next."""
    dropped_request_ids: list[str] = field(default_factory=list)
    """Ids of beams that the scheduler still has although their search has failed."""
    errors: dict[str, str] = field(default_factory=dict)
    progress: dict[str, SilentProgress] = field(default_factory=dict)
    """By request id."""


class BeamRequests:
    """Follows all live searches. The scheduler owns their beams; the caller ends those whose ids are returned."""

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
        """The number of beams after their first position that are queued for the next step. Between any two steps all
        are."""
        return sum(search.num_between_steps for search in self._live.values())

    def take_lookups(self) -> BeamLookups:
        """Return the lookups counted since the last call."""
        taken, self._lookups = self._lookups, BeamLookups()
        return taken

    def shown(self) -> frozenset[str]:
        """The displayed names of all live beams."""
        return frozenset(beam.shown_as for search in self._live.values() for beam in search.beams)

    def add(self, request: PreparedRequest, *, now_s: float) -> Request:
        """Start a search. Returns its first beam, which the caller queues."""
        search = _LiveSearch(request, vocab_size=self._vocab_size, arrival_time_s=now_s)
        self._live[request.request_id] = search
        self._follow(search)
        return search.beams[0]

    def abort(self, request_id: str, *, now_s: float) -> tuple[RequestOutput, list[str]]:
        """End a search. Returns its best sequences so far, and the ids of its beams that the scheduler still has."""
        search = self._live[request_id]
        self._forget(search)
        return search.output(self._tokenizer, now_s, unfinished="abort"), search.awaited_ids()

    def forget_all(self) -> None:
        """Stop following all searches, without any output."""
        self._live.clear()
        self._owner.clear()

    def note_launched(self, output: SchedulerOutput, *, now_s: float) -> list[str]:
        """Note the beams of a launched step. Returns the ids of searches that were scheduled for the first time."""
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
        """Process a step's result. Searches whose beams have all returned advance or end."""
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
    """One beam search, from the arrival of its request to its end."""

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
        """Whether the search is past its first position."""
        return self._metrics.first_token_s is not None

    @property
    def num_between_steps(self) -> int:
        """The number of its beams that wait for the next step, without preempted ones; 0 at the first position."""
        return sum(beam.status is RequestStatus.WAITING for beam in self.beams) if self.has_begun else 0

    @property
    def is_complete(self) -> bool:
        """Whether all beams have returned."""
        return not self._awaited

    def awaited_ids(self) -> list[str]:
        """The ids of beams that have not returned, in order."""
        return [beam.request_id for beam in self.beams if beam.request_id in self._awaited]

    def note_scheduled(self, new: NewRequest, now_s: float) -> bool:
        """Note that a beam enters the batch. Only the first time counts; returns whether this was it."""
        if self._metrics.first_scheduled_s is not None:
            return False
        self._metrics = dataclasses.replace(self._metrics, first_scheduled_s=now_s)
        self._num_cached_tokens = new.num_computed_tokens
        return True

    def take(self, update: RequestUpdate) -> None:
        """Store the result of a beam: its logprobs, or an error."""
        self._awaited.discard(update.request_id)
        if update.error is not None:
            self.error = update.error
        elif not update.logprobs:
            self.error = "the executor returned no logprobs for a beam"
        else:
            self._found[update.request_id] = update.logprobs[0]

    def advance(self, now_s: float) -> SilentProgress:
        """Choose the next beams, now that all have returned. Returns the progress made."""
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
        """The best sequences as an output. Those that have not ended get the finish reason `unfinished`. After a
        failure only these are returned, so that each shows the error."""
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
        """The text of a beam. It excludes the stop token, unless the request asks for it."""
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
