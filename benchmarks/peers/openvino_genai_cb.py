"""OpenVINO GenAI's continuous batching, reading the GGUF file directly.

On an ARM Neoverse-N1, version 2026.4.1 refuses to start: it has no paged attention there. Use it on x86.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from common import WorkItem, arguments, load, measure, own_peak_rss_bytes


class OpenVino:
    """A continuous-batching pipeline in this process."""

    name = "OpenVINO GenAI continuous batching"

    def __init__(
        self, model: str, *, sequences: int, tokens_per_step: int, threads: int, kv_gib: int, precision: str | None
    ) -> None:
        import openvino_genai as genai

        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = sequences
        scheduler.max_num_batched_tokens = tokens_per_step
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = kv_gib
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": threads}
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.version = genai.__version__
        self.settings = f"{sequences} sequences, {tokens_per_step} tokens a step, {model.rsplit('/', 1)[-1]}"

    def run(self, items: Sequence[WorkItem]) -> list[int]:
        import numpy
        import openvino

        handles = []
        for index, item in enumerate(items):
            config = self._genai.GenerationConfig()
            config.max_new_tokens = item.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = openvino.Tensor(numpy.array([item.prompt_ids], dtype=numpy.int64))
            handles.append(self._pipeline.add_request(index, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    def peak_rss_bytes(self) -> int:
        return own_peak_rss_bytes()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", help="GGUF file, or a folder in OpenVINO's own format")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--kv-gib", type=int, default=1)
    parser.add_argument("--precision", help="inference precision hint, e.g. f32; default: OpenVINO's own choice")
    options = parser.parse_args()
    started = time.perf_counter()
    peer = OpenVino(
        options.model,
        sequences=options.sequences,
        tokens_per_step=options.tokens_per_step,
        threads=options.threads,
        kv_gib=options.kv_gib,
        precision=options.precision,
    )
    measure(peer, load(options.workload, options.limit), start_s=time.perf_counter() - started)


if __name__ == "__main__":
    main()
