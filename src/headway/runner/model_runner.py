"""Runs a planned step on tensors: keep the rows up to date, gather the flat batch, run the model, sample."""

from __future__ import annotations

import torch

from headway.attention import AttentionBackend
from headway.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from headway.kv.host_blocks import HostBlocks, apply_moves
from headway.models.decoder import Decoder
from headway.runner.input_batch import InputBatch, StepInputs
from headway.runner.logprobs import prompt_logprobs
from headway.runner.sampler import Sampler
from headway.runner.sampling_batch import SamplingBatch
from headway.runner.seating import failed_shares, why_unseated
from headway.runner.seeds import seed_of
from headway.sampling_params import SamplingParams

# Rows of hidden states that become logits at one time, where a whole prompt's logits are asked for.
_PROMPT_ROWS_AT_A_TIME = 64


class ModelRunner:
    """One model, one KV cache, and the rows of the requests that are in the batch."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.device = device
        self._seed = seed
        self._host_blocks = host_blocks
        self._rows = InputBatch(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
        self._sampling = SamplingBatch(max_num_seqs, decoder.config.vocab_size, eos_token_ids=eos_token_ids)
        self._sampler = Sampler()
        self._wants_prompt_logprobs: dict[str, _PromptLogprobsRequest] = {}
        self._unseated: dict[str, str] = {}  # requests that could not enter, and why, until they leave

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the step's tokens, write their keys and values, and sample where the plan says so."""
        self._apply_changes(output)
        if not self._unseated:
            return self._compute(output)
        result = self._compute(output.without(self._unseated))
        failed = failed_shares(output, self._unseated)
        return ModelRunnerOutput({**result.sampled, **failed}, result.prompt_logprobs)

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.is_empty:
            return ModelRunnerOutput(sampled={}, prompt_logprobs={})
        inputs = self._rows.gather(output, self.device)
        self.attention.plan(inputs.attention)
        hidden = self.decoder.forward(inputs.token_ids, inputs.positions, self.attention)
        return ModelRunnerOutput(
            sampled=self._sample(output, inputs, hidden),
            prompt_logprobs=self._prompt_logprobs(output, inputs, hidden),
        )

    def _apply_changes(self, output: SchedulerOutput) -> None:
        """Who left frees a row, some blocks begin as copies, who enters gets a row, and new blocks join their tables.

        Rows are freed first, whatever fails later: the scheduler tells only once who has left.
        """
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            row = self._rows.remove(request_id)
            if row is not None:
                self._sampling.remove(row)
            self._wants_prompt_logprobs.pop(request_id, None)
            self._unseated.pop(request_id, None)
        apply_moves(self.attention.kv_caches, self._host_blocks, output.moves)
        for new in output.new_requests:
            try:
                self._add(new)
            except Exception as error:
                self._unseated[new.request_id] = why_unseated(new, error)
        for scheduled in output.scheduled:
            if scheduled.new_block_ids and scheduled.request_id not in self._unseated:
                self._rows.append_blocks(self._rows.row_of[scheduled.request_id], scheduled.new_block_ids)

    def _add(self, new: NewRequest) -> None:
        params = new.sampling_params
        assert isinstance(params, SamplingParams)
        row = self._rows.add(new)
        try:
            self._sampling.add(
                row,
                params,
                new.prompt_token_ids,
                new.output_token_ids,
                default_seed=seed_of(self._seed, new.request_id),
            )
        except Exception:
            self._rows.remove(new.request_id)
            raise
        if params.prompt_logprobs is not None:
            self._wants_prompt_logprobs[new.request_id] = _PromptLogprobsRequest(
                len(new.prompt_token_ids), params.prompt_logprobs
            )

    def _sample(self, output: SchedulerOutput, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, SampledTokens]:
        sampling = [(index, scheduled) for index, scheduled in enumerate(output.scheduled) if scheduled.samples]
        if not sampling:
            return {}
        last_tokens = inputs.query_start[1:][[index for index, _ in sampling]] - 1
        if len(last_tokens) < len(hidden):
            hidden = hidden[torch.from_numpy(last_tokens).to(self.device)]
        rows = [self._rows.row_of[scheduled.request_id] for _, scheduled in sampling]
        chosen = self._sampler.sample(self.decoder.logits(hidden).float(), rows, self._sampling)
        sampled = {}
        for place, (_, scheduled) in enumerate(sampling):
            error = chosen.errors.get(place)
            if error is not None:
                sampled[scheduled.request_id] = SampledTokens((), error=error)
                continue
            token_id, logprobs = chosen.token_ids[place], chosen.logprobs[place]
            self._rows.append_token(rows[place], token_id)
            self._sampling.append_token(rows[place], token_id)
            sampled[scheduled.request_id] = SampledTokens((token_id,), () if logprobs is None else (logprobs,))
        return sampled

    def _prompt_logprobs(
        self, output: SchedulerOutput, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[str, PromptLogprobs]:
        if not self._wants_prompt_logprobs:
            return {}
        found = {}
        for index, scheduled in enumerate(output.scheduled):
            wanted = self._wants_prompt_logprobs.get(scheduled.request_id)
            if wanted is not None:
                first_row = int(inputs.query_start[index])
                logprobs = self._logprobs_of_chunk(scheduled, wanted, hidden, first_row)
                if logprobs is not None:
                    found[scheduled.request_id] = logprobs
        return found

    def _logprobs_of_chunk(
        self, scheduled: ScheduledRequest, wanted: _PromptLogprobsRequest, hidden: torch.Tensor, first_row: int
    ) -> PromptLogprobs | None:
        """The token at position p gives the logprobs of the prompt token at p + 1."""
        start = scheduled.num_computed_tokens
        end = min(start + scheduled.num_tokens, wanted.num_prompt_tokens - 1)
        if end <= start:
            return None
        next_tokens = self._rows.token_ids_of(self._rows.row_of[scheduled.request_id], start + 1, end + 1).tolist()
        values: list[TokenLogprobs] = []
        for offset in range(0, end - start, _PROMPT_ROWS_AT_A_TIME):
            tokens = next_tokens[offset : offset + _PROMPT_ROWS_AT_A_TIME]
            rows = hidden[first_row + offset : first_row + offset + len(tokens)]
            values += prompt_logprobs(self.decoder.logits(rows).float(), tokens, wanted.num_top)
        return PromptLogprobs(start + 1, tuple(values))


class _PromptLogprobsRequest:
    """How much of a request is prompt, and how many alternatives per token it wants to see."""

    __slots__ = ("num_prompt_tokens", "num_top")

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_top = num_top
