"""Published numbers about batches and memory: gains, waste, paging."""

from __future__ import annotations

from collections.abc import Sequence

from headway_lab.claims.published_number import PublishedNumber, Question, Reading, Verdict

GAINS: Sequence[PublishedNumber] = (
    PublishedNumber(
        1,
        Question.GAIN,
        "Continuous against static batching, throughput",
        "23× at the largest spread of lengths, 3–8× typical, 3–5×, 8–23×, 2–36×",
        "Anyscale (2023), OPT-13B on an A100; guides that followed",
        (
            Reading("eras", "continuous, paged, chunked", "to static", label="prompts of 512", low=3, high=8),
            Reading("gain-map", label="widest spread", low=8, high=36),
        ),
        why={
            Verdict.CONFIRMED: "The typical ratios are those of scheduling and paging with equal kernels. 23× has a "
            "slower program as its base, or lengths that are spread much more (29).",
            Verdict.LESS: "Both sides have the same kernels here, and the batch has room for few requests.",
        },
    ),
    PublishedNumber(
        2,
        Question.GAIN,
        "Load at equal latency",
        "36.9× that of FasterTransformer",
        "Yu et al., Orca (OSDI 2022), GPT-3 175B on 16 GPUs",
        (Reading("orca", low=36.9),),
        why={
            Verdict.LESS: "The base of the paper pads prompts, computes for requests that are done, and forms its "
            "batches outside; here static batches do none of this and have the same kernels."
        },
    ),
    PublishedNumber(
        3,
        Question.WASTE,
        "GPU idle or wasted under static batching",
        "60% of an H100 idle; 60% of cycles wasted; below 50% used when answers have 10 to 500 tokens, 100 on average",
        "Articles on continuous batching",
        (
            Reading(
                "padding",
                "sealed, no padding",
                "slots that give a token, %",
                label="slots of a static batch that give a token",
                unit="%",
                high=50,
                is_fall=True,
            ),
        ),
        why={
            Verdict.CONFIRMED: "Slots of answers that have ended stay empty until the longest one ends.",
        },
    ),
    PublishedNumber(
        4,
        Question.WASTE,
        "Utilisation",
        "a naive loop and static batches 20–40%, continuous batching 75–90%",
        "Articles on continuous batching",
        (
            Reading(
                "padding", "sealed, no padding", "slots that give a token, %", label="static", unit="%", low=20, high=40
            ),
            Reading(
                "padding", "continuous", "slots that give a token, %", label="continuous", unit="%", low=75, high=90
            ),
        ),
        why={
            Verdict.CONFIRMED: "Counted are slots of the batch whose step gives a token. What of a GPU's bandwidth and "
            "arithmetic is used is another number, which `headway bench` shows.",
            Verdict.MORE: "Counted are slots of the batch whose step gives a token: a slot is filled again at once.",
            Verdict.PART: "Counted are slots of the batch whose step gives a token; how many are idle in a static "
            "batch follows from its size and the spread of its answers.",
        },
    ),
    PublishedNumber(
        5,
        Question.WASTE,
        "Padding of rectangular batches",
        "60–80% of a batch is padding; of 16 requests, one with 512 tokens and 15 with 64 leave 15 idle for 448 steps",
        "Articles on continuous batching",
        (
            Reading(
                "padding", "rectangular", "padding, % of computed rows", label="padding", unit="%", low=60, high=80
            ),
            Reading(
                "padding",
                "a batch of 16: one answer of 512, 15 of 64",
                "idle slots, all steps",
                label="512 among 64s",
                unit="idle slots in all steps",
                low=15 * 448,
                high=15 * 448,
            ),
        ),
        why={
            Verdict.CONFIRMED: "It follows from how much longer the longest answer of a batch is than the mean one.",
            Verdict.PART: "The example is exact. How much of a batch is padding follows from how much longer its "
            "longest answer is than the mean one.",
        },
    ),
    PublishedNumber(
        6,
        Question.GAIN,
        "Over a naive loop that generates one by one",
        "vLLM 24× transformers; a whole stack 3–5× a naive PyTorch loop",
        "vLLM's announcement (2023), LLaMA-13B on an A100; articles, H100",
        (
            Reading(
                "naive-loop",
                "Headway, continuous batching",
                "output tokens/s",
                "Headway, one at a time",
                label="over Headway itself, one at a time",
                low=3,
                high=24,
            ),
        ),
        why={
            Verdict.MORE: "The base here is Headway itself with one request at a time, whose kernels are the same; "
            "transformers is not simulated, and was not measured on a GPU yet.",
        },
    ),
    PublishedNumber(
        7,
        Question.GAIN,
        "Over other servers",
        "3.5× and up to 24× Text Generation Inference",
        "vLLM's announcement (2023)",
        why={
            Verdict.QUOTED: "Versions of 2023 of both. Today's servers all batch continuously; how Headway compares "
            "with some of these is measured in docs/results/peers.md and benchmarks/RESULTS.md."
        },
    ),
    PublishedNumber(
        8,
        Question.WASTE,
        "KV memory wasted by reservation, and with paging",
        "60–80%; under 4%",
        "Kwon et al., PagedAttention / vLLM (SOSP 2023)",
        (
            Reading("kv-waste", "static, reserved", "wasted, %", label="reserved", unit="%", low=60, high=80),
            Reading(
                "kv-waste", "continuous, paged, chunked", "wasted, %", label="paged", unit="%", high=4, is_fall=True
            ),
            Reading(
                "kv-waste",
                "paged, chunked, blocks of 16",
                "wasted, %",
                label="in blocks of 16",
                unit="%",
                high=4,
                is_fall=True,
            ),
        ),
        why={
            Verdict.CONFIRMED: "What is reserved and empty follows from how much longer the longest request may be; "
            "what paging leaves empty is half of each last block.",
            Verdict.PART: "Reserved memory is as empty as published. Blocks of 64 tokens, a GPU's default here, leave "
            "more in their last block than the blocks of 16 of the paper.",
        },
    ),
    PublishedNumber(
        9,
        Question.MEMORY,
        "Throughput of the larger batches that paging allows",
        "2–4× at equal latency",
        "Kwon et al., PagedAttention / vLLM (SOSP 2023), against Orca with reserved memory",
        (Reading("paging", low=2, high=4),),
        why={Verdict.CONFIRMED: "The batch grows as memory is no longer reserved, and a step costs hardly more."},
    ),
    PublishedNumber(
        10,
        Question.WASTE,
        "Memory reserved for 100 requests of 2,048 tokens",
        "266 GB",
        "Articles on continuous batching, without a model's name",
        (Reading("reserved-kv", low=266, high=266),),
        why={
            Verdict.CONFIRMED: "It is the memory of a 70B model of 2023 with 8 bits a number. Models of today have "
            "fewer KV heads, and paging reserves nothing."
        },
    ),
    PublishedNumber(
        11,
        Question.MEMORY,
        "Cost of paging in the attention kernel",
        "5–10% of attention's time",
        "Kwon et al. (SOSP 2023) and articles",
        (
            Reading(
                "paging-cost",
                "blocks of 16",
                "decode: scattered over contiguous",
                label="decode, blocks of 16",
                low=1.05,
                high=1.10,
                tolerance=0.0,
            ),
            Reading(
                "paging-cost",
                "blocks of 64",
                "decode: scattered over contiguous",
                label="blocks of 64",
                low=1.05,
                high=1.10,
                tolerance=0.0,
            ),
        ),
        is_fault=True,
        why={
            Verdict.AVOIDED: "A block is long enough to be read at full speed, and its address is looked up once.",
        },
    ),
    PublishedNumber(
        12,
        Question.MEMORY,
        "Block size: waste against tables and indirection",
        "a trade-off; the default is 16",
        "vLLM's documentation",
        (
            Reading(
                "paging-cost",
                "blocks of 16",
                "empty, %",
                label="empty in blocks of 16",
                unit="%",
                high=4,
                is_fall=True,
            ),
            Reading("paging-cost", "blocks of 256", "empty, %", label="in blocks of 256", unit="%", low=4),
        ),
        why={
            Verdict.CONFIRMED: "Half of each request's last block is empty; with blocks of 16 that hardly counts.",
        },
    ),
    PublishedNumber(
        13,
        Question.MEMORY,
        "Sharing of prefixes",
        "up to 6.4×, 5–10×",
        "Zheng et al., SGLang / RadixAttention (2023)",
        (Reading("prefix-sharing", low=5, high=10),),
        why={Verdict.CONFIRMED: "4,096 common tokens before 64 of its own are what agents and few-shot prompts have."},
    ),
    PublishedNumber(
        19,
        Question.GAIN,
        "Batch size and throughput",
        "8 requests 6×, 32 requests 15×",
        "Rule of thumb of serving guides",
        (
            Reading("batch-size", "8 at once", "to one", label="8 requests", low=6, high=6),
            Reading("batch-size", "32 at once", "to one", label="32", low=15, high=15),
        ),
        why={
            Verdict.MORE: "Reading the weights is nearly all of a step, and a batch reads them once.",
            Verdict.LESS: "These cores compute as fast as they read: most of a step is each request's own arithmetic.",
        },
    ),
    PublishedNumber(
        26,
        Question.MEMORY,
        "Quantisation of the KV cache",
        "twice the batch, and scheduling does not change",
        "Serving engines and guides (2023–2024)",
        (
            Reading("kv-quantisation", "fp8", "tokens that fit", "16 bits", "tokens that fit", low=2, high=2),
            Reading("kv-quantisation", "fp8", "output tokens/s", "16 bits", "throughput"),
        ),
        why={
            Verdict.CONFIRMED: "Scales of each token and head take a little of it. Throughput grows by less than the "
            "batch, since prompts are computed as before."
        },
    ),
    PublishedNumber(
        28,
        Question.GAIN,
        "Temperature and top-p",
        "a higher temperature spreads lengths more, so continuous batching gains more",
        "Articles on continuous batching",
        (Reading("sampling-spread", "T 1.3", "gain", "greedy", "gain at temperature 1.3 over greedy", low=1.1),),
    ),
    PublishedNumber(
        29,
        Question.GAIN,
        "Gain against the spread of lengths",
        "large where some answers have 10 and others 1,000 tokens, small where all are alike",
        "Articles on continuous batching",
        (Reading("gain-map", low=2, high=36),),
        why={
            Verdict.CONFIRMED: "Where all answers are alike, a static batch ends as a whole and nothing is gained.",
            Verdict.MORE: "Where all answers are alike, a static batch ends as a whole and nothing is gained.",
        },
    ),
)
