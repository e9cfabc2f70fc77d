"""The faults: each is one slip in the source, as somebody could make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, of the package, `old` is replaced by `new`."""

    name: str
    file: str
    seen: str
    """What a user would see of it."""
    tests: str
    """Where it is most likely to be caught: files below `tests`, separated by spaces."""
    old: str
    new: str


FAULTS = (
    # ---- scheduler --------------------------------------------------------------------------------------------------
    Fault(
        "step-over-budget",
        "core/scheduler.py",
        "A step computes more tokens than max_num_batched_tokens, and runs out of memory.",
        "unit/core/test_scheduler.py unit/core/test_speculation.py",
        "        plan.budget.take(num_taken)\n        return longer",
        "        return longer",
    ),
    Fault(
        "token-after-last",
        "core/scheduler.py",
        "With overlap a request computes one token more than it may have.",
        "property/test_scheduler_property.py",
        "elif num_computed == request.max_kv_tokens:",
        "elif num_computed == request.max_total_tokens:",
    ),
    Fault(
        "skips-not-counted",
        "core/admission.py",
        "A large request waits for ever while small ones pass it.",
        "unit/core/test_small_slips.py",
        "                self._count_skips(index)\n",
        "",
    ),
    Fault(
        "no-spare-blocks",
        "core/live_requests.py",
        "Requests enter until memory is full, and are preempted at once.",
        "unit/core/test_small_slips.py",
        "num_spare_blocks = len(self.running) - len(leaving)",
        "num_spare_blocks = 0",
    ),
    # ---- blocks and prefix cache ------------------------------------------------------------------------------------
    Fault(
        "salt-ignored",
        "core/kv/blocks.py",
        "A tenant can find out by timing what prompts others have sent.",
        "unit/core/test_block_hash.py property/test_prefix_cache_property.py",
        '(salt or "").encode("utf-8", "surrogatepass")',
        'b""',
    ),
    Fault(
        "digest-without-chain",
        "core/kv/blocks.py",
        "A prompt whose middle was seen elsewhere is answered as if its beginning was the other's.",
        "unit/core/test_block_hash.py property/test_prefix_cache_property.py",
        "digest = blake2b(digest + packed[start",
        "digest = blake2b(before + packed[start",
    ),
    Fault(
        "whole-prompt-shared",
        "core/request.py",
        "A prompt sent a second time, of exactly some blocks, is never answered.",
        "unit/engine/test_beam_requests.py",
        "return (self.num_known_tokens - 1) // block_size",
        "return self.num_known_tokens // block_size",
    ),
    Fault(
        "failed-blocks-kept",
        "core/live_requests.py",
        "After a failed step others are answered from keys and values that were never written.",
        "unit/core/test_small_slips.py",
        "keep=status is not RequestStatus.FINISHED_ERROR",
        "keep=True",
    ),
    # ---- host memory and disk ---------------------------------------------------------------------------------------
    Fault(
        "slot-reused-before-read",
        "core/kv/host_tier.py",
        "A block that is about to be copied back is overwritten, and answers go wrong.",
        "unit/core/test_host_tier.py",
        "if part.state is _FETCHING or part.is_storing or part.slot in self._read_by_next_step:",
        "if part.state is _FETCHING or part.is_storing:",
    ),
    Fault(
        "copied-in-before-out",
        "transfer/host_blocks.py",
        "A block is overwritten before it is copied to host memory.",
        "unit/transfer/test_host_blocks.py",
        "    if moves.moved_out:\n        assert host is not None\n        host.move_out(moves.moved_out)\n"
        "    if moves.copied:\n        _copy(kv_caches, moves.copied)\n"
        "    if moves.moved_in:\n        assert host is not None\n        host.move_in(moves.moved_in)\n",
        "    if moves.moved_in:\n        assert host is not None\n        host.move_in(moves.moved_in)\n"
        "    if moves.moved_out:\n        assert host is not None\n        host.move_out(moves.moved_out)\n"
        "    if moves.copied:\n        _copy(kv_caches, moves.copied)\n",
    ),
    Fault(
        "checksum-not-compared",
        "transfer/disk_store.py",
        "A damaged file of the disk cache is taken for keys and values.",
        "unit/transfer/test_disk_store.py",
        "return found is not None and found.header == self._header(digest, self._block_bytes, found.crcs)",
        "return found is not None",
    ),
    Fault(
        "disk-limit-late",
        "transfer/disk_store.py",
        "The disk cache grows beyond its limit.",
        "unit/transfer/test_disk_store.py",
        "while self._num_bytes + num_bytes > self._max_bytes and self._files:",
        "while self._num_bytes > self._max_bytes and self._files:",
    ),
    # ---- preemption -------------------------------------------------------------------------------------------------
    Fault(
        "budget-not-refunded",
        "core/shares.py",
        "Steps in which a request is preempted compute less than they could.",
        "unit/core/test_preemption.py",
        "            plan.budget.refund(share.num_tokens)\n        plan.preempted",
        "            pass\n        plan.preempted",
    ),
    Fault(
        "preempted-once-too-often",
        "core/live_requests.py",
        "A request is preempted more often than max_preemptions.",
        "unit/core/test_preemption.py",
        "if request.num_preemptions < most]",
        "if request.num_preemptions <= most]",
    ),
    Fault(
        "back-before-its-token",
        "core/live_requests.py",
        "With overlap a preempted request comes back without the token that was on its way.",
        "unit/core/test_small_slips.py",
        "        if request.num_pending_tokens:\n            return False\n        # One spare",
        "        # One spare",
    ),
    # ---- resumption -------------------------------------------------------------------------------------------------
    Fault(
        "deltas-of-the-dead",
        "front/resumption.py",
        "When a replica is replaced, clients get some tokens twice.",
        "unit/front/test_resumption.py",
        "if own is None or own.engine is not engine:  # it was aborted, or moved, when this was on its way",
        "if own is None:",
    ),
    Fault(
        "told-again",
        "engine/completion.py",
        "A request that goes on in another process repeats its answer from the beginning.",
        "unit/engine/test_llm_engine.py",
        "        self._num_sent = len(self.token_ids)\n        if self.logprobs is not None:\n"
        "            self.logprobs = [{}] * self._num_sent",
        "        if self.logprobs is not None:\n            self.logprobs = [{}] * len(self.token_ids)",
    ),
    Fault(
        "deaths-never-forgotten",
        "front/resumption.py",
        "A long request is refused after a few restarts that it did not cause.",
        "unit/front/test_resumption.py",
        "if suspicions and (delta.token_ids or delta.progress is not None):",
        "if suspicions and delta.progress is not None:",
    ),
    # ---- routing ----------------------------------------------------------------------------------------------------
    Fault(
        "full-batch-chosen",
        "front/router.py",
        "A request waits at a full replica while another has a free seat.",
        "unit/front/test_routing.py",
        "elif replica.num_requests >= replica.max_num_seqs:",
        "elif replica.num_requests > replica.max_num_seqs:",
    ),
    Fault(
        "lost-report-unnoticed",
        "front/cache_index.py",
        "Requests are sent where their prompts are not cached any more.",
        "unit/front/test_router_books.py unit/front/test_routing.py",
        "elif report.number != self._next_number.get(place, 0):",
        "elif report.number < self._next_number.get(place, 0):",
    ),
    Fault(
        "announced-for-ever",
        "front/router.py",
        "All requests with one beginning go to one replica although it has forgotten it.",
        "unit/front/test_router_books.py unit/front/test_routing.py",
        "            self._count(routed.place, -routed.num_answer_tokens, -1)\n            self._withdraw(routed)",
        "            self._count(routed.place, -routed.num_answer_tokens, -1)",
    ),
    Fault(
        "removed-still-counted",
        "front/router.py",
        "After a replica was lost, the load of the others is compared with too high an average.",
        "unit/front/test_router_books.py unit/front/test_routing.py",
        "            self._num_tokens -= replica.num_tokens\n            for request_id",
        "            for request_id",
    ),
    # ---- masks of structured output ---------------------------------------------------------------------------------
    Fault(
        "mask-of-another",
        "runner/step_runner.py",
        "When a request fails to enter, answers beside it do not fit their schemas.",
        "unit/runner/test_masks.py",
        "            kept += range(number, number + count)\n        number += count",
        "            kept += range(number, number + count)\n            number += count",
    ),
    Fault(
        "list-instead-of-grammar",
        "structured/guides.py",
        "With allowed tokens besides a schema, answers do not fit the schema.",
        "unit/structured/test_guide_masks.py",
        "own[:] = guide.allowed if guide.matcher is None else own & guide.allowed",
        "own[:] = guide.allowed",
    ),
    Fault(
        "guided-anew",
        "structured/guides.py",
        "A structured answer that goes on in another process begins its JSON once more.",
        "unit/structured/test_guide_masks.py",
        "        self.num_read = 0\n",
        "        self.num_read = len(request.output_token_ids)\n",
    ),
    Fault(
        "end-barred-by-min-tokens",
        "structured/guides.py",
        "A structured answer shorter than min_tokens fails.",
        "unit/structured/test_guide_masks.py unit/engine/test_guided_steps.py",
        "is_barred = self._ignores_eos or self.num_read < self._min_tokens",
        "is_barred = self._ignores_eos",
    ),
    # ---- sampler ----------------------------------------------------------------------------------------------------
    Fault(
        "seed-zero-is-none",
        "runner/sampler.py",
        "Requests with seed 0 are answered differently each time.",
        "unit/runner/test_sampling_kernels.py",
        "(seat.default_seed if params.seed is None else params.seed)",
        "(params.seed or seat.default_seed)",
    ),
    Fault(
        "repetition-swapped",
        "runner/cpu_sampling.py",
        "repetition_penalty above 1 makes repetitions more likely.",
        "unit/runner/test_sampling_kernels.py",
        "np.where(values > 0, values / repetition, values * repetition)",
        "np.where(values > 0, values * repetition, values / repetition)",
    ),
    Fault(
        "min-p-without-temperature",
        "runner/sampler.py",
        "min_p keeps too many tokens at low temperatures, and too few at high ones.",
        "unit/runner/test_sampling_kernels.py",
        "params.temperature * math.log(params.min_p) if params.min_p > 0.0",
        "math.log(params.min_p) if params.min_p > 0.0",
    ),
    Fault(
        "min-tokens-one-more",
        "runner/logit_edits.py",
        "An answer cannot end at min_tokens, only after one token more.",
        "unit/runner/test_logit_edits.py unit/runner/test_sampling_kernels.py",
        "(num_output_tokens < until)]",
        "(num_output_tokens <= until)]",
    ),
    # ---- readers of quantised weights -------------------------------------------------------------------------------
    Fault(
        "awq-order",
        "loader/quantized_weights.py",
        "AWQ models answer with nonsense.",
        "unit/loader/test_quantized_weights.py",
        "_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)",
        "_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
    ),
    Fault(
        "gptq-zeros-less-one",
        "loader/quantized_weights.py",
        "GPTQ models of the older format answer with nonsense.",
        "unit/loader/test_quantized_weights.py",
        "(_unpack(zeros, bits) + config.stores_zeros_less_one - middle).t()",
        "(_unpack(zeros, bits) - middle).t()",
    ),
    Fault(
        "group-limit",
        "loader/quantized_weights.py",
        "A damaged GPTQ checkpoint ends in an IndexError, not in a message.",
        "unit/loader/test_quantized_weights.py",
        "((groups < 0) | (groups >= num_groups)).any()",
        "((groups < 0) | (groups > num_groups)).any()",
    ),
    Fault(
        "last-tile-lost",
        "layers/quantized_weight.py",
        "With tensor parallelism, quantised rows that end within a tile cannot be loaded.",
        "unit/layers/test_packed_int4.py unit/layers/test_quantized_linear.py unit/loader/test_quantized_weights.py",
        "tiles = slice(part.start // size, -(-part.stop // size))",
        "tiles = slice(part.start // size, part.stop // size)",
    ),
    # ---- limits of HTTP ---------------------------------------------------------------------------------------------
    Fault(
        "chunked-without-limit",
        "server/http/asgi_io.py",
        "A client that does not say how large its body is can fill the memory.",
        "unit/server/test_faults.py unit/server/test_http_server.py",
        "                if num_held > self._max_bytes:\n                    raise self._too_large()\n",
        "",
    ),
    Fault(
        "large-body-turn-kept",
        "server/http/asgi_io.py",
        "After some large bodies all others get 429.",
        "unit/server/test_faults.py unit/server/test_http_server.py",
        "        finally:\n            self._num_parsing -= 1\n",
        "        finally:\n            pass\n",
    ),
    Fault(
        "place-in-queue-kept",
        "server/admission/queue_limits.py",
        "After some requests that were refused or cancelled the queue is full for ever.",
        "unit/server/test_overload.py unit/server/test_tenants.py",
        "    ) -> None:\n        self._leave()\n",
        "    ) -> None:\n        pass\n",
    ),
    # ---- drain ------------------------------------------------------------------------------------------------------
    Fault(
        "health-refused",
        "server/app.py",
        "While a server drains, /health and /metrics are refused like a request.",
        "unit/server/test_draining.py",
        "if self._services.drain.is_refusing and record.path not in STAYING_PATHS:",
        "if self._services.drain.is_refusing:",
    ),
    Fault(
        "lame-for-too-long",
        "server/http/draining.py",
        "A server takes requests beyond its drain timeout, and cuts them off.",
        "unit/server/test_draining.py",
        "self._lame_duck_s = min(lame_duck_s, timeout_s)",
        "self._lame_duck_s = lame_duck_s",
    ),
    Fault(
        "idle-connections-wait",
        "server/http/http_server.py",
        "A server with idle connections does not end before its drain timeout.",
        "unit/server/test_http_server.py unit/server/test_draining.py",
        "            connection.end_after_answer()\n",
        "            connection.loop\n",
    ),
)
