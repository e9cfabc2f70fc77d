"""The engine as programs use it: text or tokens in, `RequestOutput`s out, one step at a time."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

from headway.config import EngineConfig, ResolvedConfig
from headway.core import Request, RequestStatus, RequestUpdate
from headway.core.create import create_scheduler
from headway.core.forecast.forecaster import Forecast
from headway.core.kv.manager import CacheReset
from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.engine.beam_requests import BeamRequests, SearchedStep
from headway.engine.engine_core import EngineCore
from headway.engine.output_processor import EndedCompletion, OutputProcessor
from headway.engine.prompt_forms import Prompt
from headway.engine.request_preparer import PreparedRequest, RequestPreparer
from headway.engine.step_report import EngineStep
from headway.engine.utilisation import UtilisationMeter
from headway.errors import InvalidRequestError
from headway.executor import MaskedExecutor
from headway.executor.guided import GuidedExecutor
from headway.models.decoder_config import DecoderConfig
from headway.outputs import Delivered, RequestOutput, Streaming
from headway.predict import AnswerLengths
from headway.sampling_params import SamplingParams
from headway.structured.compiling import GrammarCompiler
from headway.structured.guides import Guides
from headway.tokenizer import Tokenizer
from headway.tokenizer.own_template import use_chat_template
from headway.tracing import span
from headway.worker.memory_plan import MemoryPlan
from headway.worker.step_costs import planned_costs

logger = logging.getLogger(__name__)


class LLMEngine:
    """A synchronous engine for a single thread: the caller of `step()` drives it. An exception from outside in the
    middle of a call, such as Ctrl-C in the main thread, may leave a step half done; `abort_all` repairs that. `LLM`
    avoids the problem by stepping in a separate thread."""

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        executor: MaskedExecutor,
        tokenizer: Tokenizer | None,
        model_config: DecoderConfig,
        plan: MemoryPlan,
        now: Callable[[], float] = time.perf_counter,
        lengths: AnswerLengths | None = None,
    ) -> None:
        """`lengths` predicts the answer's length for requests without a prediction, and learns from and logs their
        ends. It is closed with the engine."""
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.plan = plan
        self._now = now
        self._lengths = lengths
        vocab_size = model_config.vocab_size
        self.guides = Guides(None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size), vocab_size)
        self.executor = executor
        self._guided = GuidedExecutor(executor, self.guides)
        scheduler = create_scheduler(config.scheduler, config.cache, plan)
        if scheduler.speculation is not None:
            scheduler.speculation.guides = self.guides
        self.core = EngineCore(scheduler, executor, now=now)
        self.utilisation = UtilisationMeter(planned_costs(model_config, plan), plan.ceilings)
        self.preparer = RequestPreparer(
            tokenizer=tokenizer, vocab_size=model_config.vocab_size, max_model_len=plan.max_model_len
        )
        self._outputs = OutputProcessor(
            tokenizer,
            stop=self.core.stop_request,
            on_end=None if lengths is None else functools.partial(_note_end, lengths),
        )
        self.beams = BeamRequests(tokenizer, vocab_size=model_config.vocab_size)

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, progress: Callable[[int, int], None] | None = None, predicts: bool = True
    ) -> LLMEngine:
        """Load the model that the configuration names and make it ready. Without `predicts`, this engine predicts no
        answer lengths, whatever the configuration says, because the server's process does."""
        # Heavy, and not needed with an executor from outside.
        from headway.executor.local import LocalExecutor
        from headway.executor.ranks import RanksExecutor
        from headway.loader.chosen_model import open_draft, open_model
        from headway.loader.model_tokenizer import open_tokenizer
        from headway.worker.formats import choose_device
        from headway.worker.rank_start import first_rank

        # First: what is wrong with a file need not wait for the model.
        lengths = AnswerLengths.from_config(config.prediction) if predicts else None
        resolved = config.resolve(choose_device(config.device.device).type)
        checkpoint = open_model(config.model)
        tokenizer = open_tokenizer(config.model.tokenizer) if config.model.tokenizer else checkpoint.tokenizer()
        use_chat_template(tokenizer, config.model.chat_template)
        if tokenizer is not None:
            tokenizer.drop_end_tokens_outside(checkpoint.config.vocab_size)
        eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        draft = open_draft(config.model)
        executor: LocalExecutor | RanksExecutor
        if resolved.device.tensor_parallel_size > 1:
            with first_rank(resolved, eos_token_ids=eos_token_ids) as start:
                executor = RanksExecutor(start, checkpoint, draft, progress)
        else:
            executor = LocalExecutor.from_config(
                resolved, checkpoint, eos_token_ids=eos_token_ids, draft=draft, progress=progress
            )
        logger.info("memory plan\n%s", executor.plan)
        return cls(
            resolved,
            executor=executor,
            tokenizer=tokenizer,
            model_config=checkpoint.config,
            plan=executor.plan,
            lengths=lengths,
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> PreparedRequest:
        """Check a request without queueing it. The result can be given to `submit`. Raises `InvalidRequestError`."""
        prepared = self.preparer.prepare(request_id, prompt, params, options)
        self.core.scheduler.check_fits(prepared.children[0])
        if prepared.params.grammar is not None:
            self.guides.compile(prepared.params).result()
        return prepared

    def submit(self, request: PreparedRequest, *, stream: Streaming = True) -> None:
        """Queue a prepared request."""
        self.submit_all([request], stream=stream)

    def forecast(self, request: PreparedRequest) -> Forecast | None:
        """Return what to expect of a prepared request that is about to be submitted; `None` if that is not known.
        For a request with several completions it is the forecast of the first of them."""
        return self.core.forecast(request.children[0])

    def submit_all(self, requests: Sequence[PreparedRequest], *, stream: Streaming = True) -> None:
        """Queue all prepared requests in this order, or none of them. If answer lengths are predicted, one call
        predicts them all."""
        for request in requests:
            self._check_new(request, stream)
        if self._lengths is not None and self._lengths.predicts:
            requests = self._predict(self._lengths, requests)
        for request in requests:
            self._queue(request, stream)

    def _predict(self, lengths: AnswerLengths, requests: Sequence[PreparedRequest]) -> list[PreparedRequest]:
        """The same requests with a predicted length where they had none. The length of a beam search is not
        predicted."""
        unknown = [
            request
            for request in requests
            if request.options.predicted_tokens is None and not request.params.use_beam_search
        ]
        guesses = lengths.predict([request.view for request in unknown])
        known = {
            request.request_id: dataclasses.replace(
                request, options=dataclasses.replace(request.options, predicted_tokens=guess)
            )
            for request, guess in zip(unknown, guesses, strict=True)
        }
        return [known.get(request.request_id, request) for request in requests]

    def _check_new(self, request: PreparedRequest, stream: Streaming) -> None:
        if self.is_live(request.request_id):
            raise InvalidRequestError(f"Request id '{request.request_id}' is already in use.", param="request_id")
        if stream:
            request.params.check_can_stream()

    def resume(self, request: PreparedRequest, delivered: Sequence[Delivered]) -> RequestOutput | None:
        """Queue a prepared request that continues from another engine; it streams deltas. `delivered` has the tokens of
        each completion so far, and the next tokens are the ones that it would have had there. Returns an output with
        the completions that have ended but whose end was not delivered, or None."""
        if len(delivered) != len(request.children):
            raise InvalidRequestError(
                f"{len(delivered)} completions go on, and the request has {len(request.children)}.", param="delivered"
            )
        self._check_new(request, "delta")
        for own in delivered:
            if own.token_ids and not 0 <= min(own.token_ids) <= max(own.token_ids) < self.model_config.vocab_size:
                raise InvalidRequestError("A token to go on from is outside the vocabulary.", param="delivered")
        self._outputs.add(request, stream="delta", now_s=self._now())
        output = self._outputs.resume(request.request_id, delivered, now_s=self._now())
        ended = () if output is None else {each.index for each in output.outputs}
        for index, (child, own) in enumerate(zip(request.children, delivered, strict=True)):
            if index not in ended and not own.is_finished:
                child.resume(own.token_ids)
                self._add(child)
        return output

    def _queue(self, request: PreparedRequest, stream: Streaming) -> None:
        if request.params.use_beam_search:
            self.core.add_request(self.beams.add(request, now_s=self._now()))
            return
        for child in request.children:
            self._add(child)
        self._outputs.add(request, stream=stream, now_s=self._now())

    def _add(self, child: Request) -> None:
        self.core.add_request(child)
        if child.is_guided:
            self.guides.add(child)
            self.core.executor = self._guided  # an engine without guided requests pays nothing for them

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        stream: Streaming = True,
    ) -> None:
        """Check and queue a request. `stream` says when it gives outputs and whether these are cumulative."""
        self.submit(self.prepare(request_id, prompt, params, options), stream=stream)

    def step(self) -> EngineStep:
        """Process the result of one step. Where steps overlap, later ones have already been launched; see
        `EngineCore.step`."""
        started_s = self._now()
        step = self.core.step()
        self.utilisation.take(step.report)
        if self.guides.live:
            self._guided.results_taken()
        begun = []
        for launched in step.launched:
            begun += self._outputs.note_launched(launched, now_s=started_s)
            begun += self.beams.note_launched(launched, now_s=started_s)
        with span("outputs"):
            searched = self._search(step.updates) if self.beams else None
            updates = step.updates if searched is None else searched.others
            processed = self._outputs.process(updates, now_s=self._now())
        if searched is None:
            return EngineStep(processed.outputs, processed.errors, processed.progress, begun, step.report)
        return EngineStep(
            outputs=searched.outputs + processed.outputs,
            errors=searched.errors | processed.errors,
            progress=searched.progress | processed.progress,
            begun=begun,
            report=step.report,
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks at once. Returns its output, or for a stream of deltas the new part; `None`
        if there is no such request."""
        owner = next((owner for owner in (self._outputs, self.beams) if request_id in owner), None)
        if owner is None:
            return None
        output, running = owner.abort(request_id, now_s=self._now())
        for child_id in running:
            self.core.finish_request(child_id, RequestStatus.FINISHED_ABORTED)
        self.guides.forget_finished()
        return output

    def abort_all(self) -> None:
        """End all requests without further output, also after a step has failed half-way. Afterwards the engine is as
        if new, except for its cache."""
        self._outputs.forget_all()
        self.beams.forget_all()
        for request_id in list(self.core.scheduler.requests):
            self.core.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        self.guides.forget_finished()
        self.core.drain()

    def _search(self, updates: list[RequestUpdate]) -> SearchedStep:
        """Advance beam searches with their part of a step's result. Returns what they did and the updates of other
        requests."""
        searched = self.beams.process(updates, now_s=self._now())
        for request_id in searched.dropped_request_ids:
            self.core.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        for beam in searched.new_beams:
            self.core.add_request(beam)
        return searched

    def is_live(self, request_id: str) -> bool:
        """Whether a request with this id waits or runs."""
        return request_id in self._outputs or request_id in self.beams

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return self.core.has_unfinished_requests

    def reset_prefix_cache(self, *, with_disk: bool = False) -> CacheReset:
        """Forget all cached blocks that no request uses or waits for. `with_disk`: those on disk are deleted too."""
        return self.core.reset_prefix_cache(with_disk=with_disk)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if requests, queue and blocks disagree."""
        self.core.check_invariants()

    def warm_up(self) -> int:
        """Prepare, before the first request, what would slow down the first steps. The engine must be idle. Returns how
        many kinds of steps were prepared; 0 on a CPU."""
        return self.executor.warm_up()

    def shutdown(self) -> None:
        """Free the model and its cache."""
        self.core.shutdown()
        self.guides.close()
        if self._lengths is not None:
            self._lengths.close()


def _note_end(lengths: AnswerLengths, ended: EndedCompletion) -> None:
    """Report an ended completion to the predictor. This is no method, because a reference from the output processor to
    the engine would keep the engine alive until the next garbage collection."""
    lengths.note_end(
        ended.request.view,
        num_output_tokens=ended.num_tokens,
        finish_reason=ended.finish_reason,
        arrival_s=time.time() - ended.age_s,
    )
