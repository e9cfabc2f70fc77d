"""Hugging Face transformers' own continuous batching, float32, weights read from the GGUF file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from common import WorkItem, arguments, load, measure, own_peak_rss_bytes


class Transformers:
    """A model in this process; one batching manager per run."""

    name = "transformers continuous batching"

    def __init__(self, model: Path, *, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self.settings = "float32, paged sdpa"
        self._transformers = transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(model.parent), gguf_file=model.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def run(self, items: Sequence[WorkItem]) -> list[int]:
        config = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(item.max_tokens for item in items)
        )
        manager = self._model.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            ids = [manager.add_request(item.prompt_ids, max_new_tokens=item.max_tokens) for item in items]
            counts: dict[str, int] = {}
            while len(counts) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    counts[result.request_id] = len(result.generated_tokens)
            return [counts[request_id] for request_id in ids]
        finally:
            manager.stop(block=True)

    def peak_rss_bytes(self) -> int:
        return own_peak_rss_bytes()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", type=Path, help="GGUF file")
    options = parser.parse_args()
    started = time.perf_counter()
    peer = Transformers(options.model, threads=options.threads)
    measure(peer, load(options.workload, options.limit), start_s=time.perf_counter() - started)


if __name__ == "__main__":
    main()
