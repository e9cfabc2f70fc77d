"""Records how long the embedded model's answers are, by temperature and top-p, for the claim `sampling-spread`.

python benchmarks/answer_lengths.py src/headway_lab/claims/answer_lengths.json    # some minutes on two cores
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

from headway import LLM
from headway.progress import progress_bar
from headway_lab.bench.environment import device_name
from headway_lab.claims.answer_lengths import PROMPTS, Recorded, measure_answers, num_answers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
parser.add_argument("--samples", type=int, default=4)
parser.add_argument("--max-tokens", type=int, default=512)
arguments = parser.parse_args()

llm = LLM(device="cpu", max_num_seqs=64)
with progress_bar(num_answers(len(PROMPTS), arguments.samples), "answering") as progress:
    answers = measure_answers(
        llm.engine,
        num_prompts=len(PROMPTS),
        num_samples=arguments.samples,
        max_tokens=arguments.max_tokens,
        progress=progress,
    )
origin = (
    f"{arguments.samples} answers of the embedded SmolLM2-135M to each of {len(PROMPTS)} prompts, cut off at "
    f"{arguments.max_tokens:,} tokens ({date.today().isoformat()}, {device_name('cpu')})"
)
arguments.file.write_text(json.dumps(Recorded(origin, answers).as_json()) + "\n", encoding="utf-8")
print(f"Wrote {arguments.file}")
