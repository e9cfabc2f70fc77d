"""Runs planned steps on a GPU without ever waiting for it: inputs are sent, kernels are queued, and the host goes on.

    submit(n)    send changes · gather the batch from the rows · model · sample · copy the tokens back      all queued
    submit(n+1)  the same, behind it; its token ids are read from the rows, where the sampler of step n puts them
    result(n)    wait for step n's copy

Steps are replayed as CUDA graphs, padded to the next of a ladder of sizes, unless they are so long that their launches
hide behind the step before anyway: then they run as they are. Under the Triton interpreter the same code runs on CPU
tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.attention import AttentionBackend, AttentionBatch, DividesWork
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SampledTokens,
    SchedulerOutput,
    TokenLogprobs,
)
from headway.kv.host_blocks import HostBlocks, apply_moves
from headway.models.decoder import Decoder
from headway.runner.cuda_graphs import (
    StepGraphs,
    StepShape,
    decode_rungs,
    rung_above,
    sample_rungs,
    token_rungs,
)
from headway.runner.gpu_rows import GpuRows, StagedStep
from headway.runner.gpu_sampler import GpuSampler, PendingSample, Seat
from headway.runner.logprobs import prompt_logprobs
from headway.runner.seating import failed_shares, why_unseated
from headway.runner.seeds import seed_of
from headway.sampling_params import SamplingParams

# Rows of hidden states that become logits at one time, where a whole prompt's logits are asked for.
_PROMPT_ROWS_AT_A_TIME = 64
# A layer's kernels are launched in 0.3 to 0.8 ms and computed at some 600 TFLOP/s. With more multiplications per layer
# than this a step takes at least twice as long to compute as to launch, so that the host is back in time for the tokens
# of the step before, and padding would cost more than a graph saves.
_LAUNCH_BOUND_FLOPS = 4.5e11


class GpuModelRunner:
    """One model, one KV cache, and the rows of the requests that are in the batch."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        use_graphs: bool = True,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.device = device
        self._seed = seed
        self._host_blocks = host_blocks
        self._division = attention if isinstance(attention, DividesWork) else None
        self._rows = GpuRows(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_tokens=max(max_num_batched_tokens, max_num_seqs),
            device=device,
            division=self._division,
        )
        self._sampler = GpuSampler(
            max_num_seqs=max_num_seqs,
            vocab_size=decoder.config.vocab_size,
            device=device,
            eos_token_ids=eos_token_ids,
            token_rows=self._rows.token_rows,
        )
        self._logits = torch.empty(
            max_num_seqs, decoder.config.vocab_size, dtype=decoder.embedding.dtype, device=device
        )
        self._graphs: StepGraphs | None = None
        if use_graphs and self._division is not None:
            self._graphs = StepGraphs(device)
        self._decode_rungs = decode_rungs(max_num_seqs)
        self._token_rungs = token_rungs(min(max_num_batched_tokens, _launch_bound_tokens(decoder)))
        self._sample_rungs = sample_rungs(max_num_seqs)
        self._prompts_with_logprobs: dict[str, _WantedPrompt] = {}
        self._unseated: dict[str, str] = {}  # requests that could not enter, and why, until they leave

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> PendingGpuStep:
        """Queue a step on the device."""
        self._apply_changes(output)
        if not self._unseated:
            return self._launch(output)
        pending = self._launch(output.without(self._unseated))
        return dataclasses.replace(pending, failed=failed_shares(output, self._unseated))

    def _launch(self, output: SchedulerOutput) -> PendingGpuStep:
        if output.is_empty:
            return PendingGpuStep(None, [], None, {})
        step = self._rows.stage(output, padded=self._padded)
        logits, prompt_logprobs = self._forward(step)
        pending = None
        if step.sampled:
            columns, count = self._rows.columns, len(step.sampled)
            pending = self._sampler.sample(
                logits, step.sample_rows, columns["sample_rows"][:count], columns["sample_positions"][:count]
            )
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return PendingGpuStep(done, [step.request_ids[place] for place in step.sampled], pending, prompt_logprobs)

    @torch.inference_mode()
    def capture_graphs(self) -> int:
        """Make the graphs of all shapes, so that no step has to wait for its own. Only while no step is in flight.

        Returns how many shapes there are; 0 where nothing can be captured.
        """
        if self._graphs is None or not self._graphs.can_capture:
            return 0
        self._rows.stage_nothing()
        shapes = self.shapes()
        for shape in shapes:
            self._graphs.prepare(shape, self._run_shape)
        return len(shapes)

    def shapes(self) -> list[StepShape]:
        """All that steps are padded to, the largest first: what it takes in memory the smaller ones can use."""
        found = [StepShape(num_tokens, num_tokens, has_chunks=False) for num_tokens in self._decode_rungs]
        for num_tokens in self._token_rungs:
            fewer = 0
            for num_rows in self._sample_rungs:
                if fewer < num_tokens:  # no request without a token
                    found.append(StepShape(num_tokens, num_rows, has_chunks=True))
                fewer = num_rows
        return sorted(found, reverse=True)

    # ---- the batch ------------------------------------------------------------------------------------------------

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Who left frees a row, some blocks begin as copies of others, and who enters gets a row.

        Rows are freed first, whatever fails later: the scheduler tells only once who has left.
        """
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            row = self._rows.remove(request_id)
            if row is not None:
                self._sampler.remove(row)
            self._prompts_with_logprobs.pop(request_id, None)
            self._unseated.pop(request_id, None)
        apply_moves(self.attention.kv_caches, self._host_blocks, output.moves)
        if output.new_requests:
            self._seat(output.new_requests)

    def _seat(self, requests: Sequence[NewRequest]) -> None:
        """All at once, with one copy; if that does not work, one by one, and those that do not fit fail alone."""
        try:
            self._add(requests)
        except Exception as error:
            for request in requests:
                self._rows.remove(request.request_id)  # the sampler keeps its rows free by itself
                self._prompts_with_logprobs.pop(request.request_id, None)
            if len(requests) == 1:
                self._unseated[requests[0].request_id] = why_unseated(requests[0], error)
                return
            for request in requests:
                self._seat([request])

    def _add(self, requests: Sequence[NewRequest]) -> None:
        rows = self._rows.add(requests)
        seats = []
        for row, new in zip(rows, requests, strict=True):
            params = new.sampling_params
            assert isinstance(params, SamplingParams)
            seed = seed_of(self._seed, new.request_id)
            seats.append(Seat(row, params, new.prompt_token_ids, new.output_token_ids, seed))
            if params.prompt_logprobs is not None:
                self._prompts_with_logprobs[new.request_id] = _WantedPrompt(
                    new.prompt_token_ids, params.prompt_logprobs
                )
        self._sampler.add(seats)

    # ---- the model ------------------------------------------------------------------------------------------------

    def _padded(self, num_tokens: int, is_decode: bool) -> int:
        """How many tokens a step is padded to: up to a rung where it is going to be a graph."""
        if self._graphs is None or self._prompts_with_logprobs:
            return num_tokens
        rung = rung_above(self._decode_rungs if is_decode else self._token_rungs, num_tokens)
        return num_tokens if rung is None else rung

    def _forward(self, step: StagedStep) -> tuple[Tensor, dict[str, PromptLogprobs]]:
        """Logits of the requests that sample, in their order; and logprobs of prompts, for those that asked."""
        if self._prompts_with_logprobs:
            return self._forward_all_rows(step)
        num_samples = len(step.sampled)
        sample_index = self._rows.columns["sample_index"]
        num_tokens = self._padded(step.num_tokens, step.is_decode)
        if self._graphs is not None and step.is_decode:
            shape = StepShape(num_tokens, num_tokens, has_chunks=False)
            self._graphs.run(shape, self._run_shape)
            logits = self._logits[: step.num_requests]
            in_order = step.all_sample_in_order
            return logits if in_order else logits.index_select(0, sample_index[:num_samples]), {}
        if self._graphs is not None and num_tokens in self._token_rungs:
            num_rows = rung_above(self._sample_rungs, num_samples)
            assert num_rows is not None
            shape = StepShape(num_tokens, num_rows, has_chunks=True)
            self._graphs.run(shape, self._run_shape)
            return self._logits[:num_samples], {}
        hidden = self._hidden(step, sample_index[:num_samples])
        if not num_samples:
            return self._logits[:0], {}
        return self.decoder.logits(hidden, out=self._logits[:num_samples]), {}

    def _hidden(self, step: StagedStep, wanted_rows: Tensor | None) -> Tensor:
        """Run a step as it is."""
        rows = self._rows
        rows.gather(step.num_requests, step.max_query_len)
        self.attention.plan(
            self._batch(
                step.num_tokens,
                step.num_requests,
                max_query_len=step.max_query_len,
                max_seq_len=step.max_seq_len,
                num_single=step.num_single,
                num_parts=step.num_parts,
                num_tiles=step.num_tiles,
            )
        )
        return self.decoder.forward(
            rows.token_ids[: step.num_tokens], rows.positions[: step.num_tokens], self.attention, wanted_rows
        )

    def _run_shape(self, shape: StepShape) -> None:
        """Run the staged step with all numbers at their limits: from the columns to `self._logits`."""
        rows = self._rows
        num_tokens, num_samples, has_chunks = shape
        max_requests = min(num_tokens, len(rows.token_rows))
        assert self._division is not None
        rows.gather(max_requests + 1, num_tokens)  # one more than can take part, for the padding
        self.attention.plan(
            self._batch(
                num_tokens,
                max_requests + has_chunks,  # with chunks there is one that has several tokens, whatever their number
                max_query_len=num_tokens if has_chunks else 1,
                max_seq_len=rows.max_model_len,
                num_single=max_requests,
                num_parts=self._division.max_parts(max_requests),
                num_tiles=self._division.max_tiles(num_tokens, max_requests) if has_chunks else 0,
            )
        )
        wanted_rows = rows.columns["sample_index"][:num_samples] if has_chunks else None
        hidden = self.decoder.forward(
            rows.token_ids[:num_tokens], rows.positions[:num_tokens], self.attention, wanted_rows
        )
        self.decoder.logits(hidden, out=self._logits[:num_samples])

    def _batch(
        self,
        num_tokens: int,
        num_requests: int,
        *,
        max_query_len: int,
        max_seq_len: int,
        num_single: int,
        num_parts: int,
        num_tiles: int,
    ) -> AttentionBatch:
        rows, columns = self._rows, self._rows.columns
        return AttentionBatch(
            num_tokens=num_tokens,
            num_requests=num_requests,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start=columns["query_start"][: num_requests + 1],
            seq_lens=columns["seq_lens"][:num_requests],
            block_table=rows.block_table,
            slot_mapping=rows.slots[:num_tokens],
            rows=columns["rows"][:num_requests],
            num_single=num_single,
            parts=rows.parts(num_parts) if num_parts else None,
            tiles=rows.tiles(num_tiles) if num_tiles else None,
            num_tiles=columns["counts"][1:2] if num_tiles else None,
        )

    # ---- logprobs of prompts: rare, and the one thing here that waits for the device --------------------------------

    def _forward_all_rows(self, step: StagedStep) -> tuple[Tensor, dict[str, PromptLogprobs]]:
        hidden = self._hidden(step, None)
        found = {}
        for place, request_id in enumerate(step.request_ids):
            wanted = self._prompts_with_logprobs.get(request_id)
            if wanted is not None:
                first, after_last = step.query_start[place : place + 2].tolist()
                start = int(step.seq_lens[place]) - (after_last - first)
                logprobs = self._logprobs_of_chunk(wanted, hidden[first:after_last], start)
                if logprobs is not None:
                    found[request_id] = logprobs
        sample_index = self._rows.columns["sample_index"][: len(step.sampled)]
        return self.decoder.logits(hidden.index_select(0, sample_index)), found

    def _logprobs_of_chunk(self, wanted: _WantedPrompt, hidden: Tensor, start: int) -> PromptLogprobs | None:
        """The token at position p gives the logprobs of the prompt token at p + 1."""
        next_tokens = wanted.token_ids[start + 1 : start + 1 + len(hidden)]
        values: list[TokenLogprobs] = []
        for offset in range(0, len(next_tokens), _PROMPT_ROWS_AT_A_TIME):
            tokens = next_tokens[offset : offset + _PROMPT_ROWS_AT_A_TIME]
            logits = self.decoder.logits(hidden[offset : offset + len(tokens)]).float()
            values += prompt_logprobs(logits, tokens, wanted.num_top)
        return PromptLogprobs(start + 1, tuple(values)) if values else None


def _launch_bound_tokens(decoder: Decoder) -> int:
    layer = decoder.layers[0]
    num_weights = sum(p.in_features * p.out_features for p in layer.linears)
    return max(64, int(_LAUNCH_BOUND_FLOPS / num_weights))


@dataclass(frozen=True, slots=True)
class PendingGpuStep:
    """A queued step. `done` is reached when its tokens are on the host; `None` where there is nothing to wait for."""

    done: torch.cuda.Event | None
    sampled_request_ids: list[str]
    sample: PendingSample | None
    prompt_logprobs: dict[str, PromptLogprobs]
    failed: dict[str, SampledTokens] = field(default_factory=dict)
    """Of requests that could not enter the batch."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step."""
        if self.done is not None:
            self.done.synchronize()
        sampled = self.failed.copy()
        if self.sample is not None:
            chosen = self.sample.result()
            for place, request_id in enumerate(self.sampled_request_ids):
                error, logprobs = chosen.errors.get(place), chosen.logprobs[place]
                if error is not None:
                    sampled[request_id] = SampledTokens((), error=error)
                else:
                    sampled[request_id] = SampledTokens(
                        (chosen.token_ids[place],), () if logprobs is None else (logprobs,)
                    )
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs=self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class _WantedPrompt:
    """A prompt whose logprobs a request wants to see, and how many alternatives per token."""

    token_ids: tuple[int, ...]
    num_top: int
