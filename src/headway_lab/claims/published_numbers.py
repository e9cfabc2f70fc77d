"""The thirty numbers that articles about continuous batching lean on, and the claims that answer them.

Each is compared with values that a claim has measured (`numbers_table`); no measured value stands here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway_lab.claims.published_number import PublishedNumber, Question, Reading, Verdict

NUMBERS: Sequence[PublishedNumber] = (
    PublishedNumber(
        1,
        Question.GAIN,
        "Continuous against static batching, throughput",
        "23× at the largest spread of lengths, 3–8× typical, 3–5×, 8–23×, 2–36×",
        "Anyscale (2023), OPT-13B on an A100; guides that followed",
        (Reading("eras", "continuous, paged, chunked", "to static", label="prompts of 512", low=3, high=8),),
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
        (Reading("static-waste"),),
    ),
    PublishedNumber(
        4,
        Question.WASTE,
        "Utilisation",
        "a naive loop and static batches 20–40%, continuous batching 75–90%",
        "Articles on continuous batching",
        (Reading("utilisation"),),
    ),
    PublishedNumber(
        5,
        Question.WASTE,
        "Padding of rectangular batches",
        "60–80% of a batch is padding; of 16 requests, one with 512 tokens and 15 with 64 leave 15 idle for 448 steps",
        "Articles on continuous batching",
        (Reading("padding"),),
    ),
    PublishedNumber(
        6,
        Question.GAIN,
        "Over a naive loop that generates one by one",
        "vLLM 24× transformers; a whole stack 3–5× a naive PyTorch loop",
        "vLLM's announcement (2023), LLaMA-13B on an A100; articles, H100",
        (Reading("naive-loop"),),
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
        (Reading("paging-cost"),),
    ),
    PublishedNumber(
        12,
        Question.MEMORY,
        "Block size: waste against tables and indirection",
        "a trade-off; the default is 16",
        "vLLM's documentation",
        (Reading("block-size"),),
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
        14,
        Question.WAIT,
        "Chunked prefill, time to first token",
        "P95 −50–70% on mixed loads; P99 up to 6× lower without loss of throughput",
        "Agrawal et al., Sarathi-Serve (OSDI 2024), and guides that followed",
        (
            Reading(
                "chunked-prefill",
                "chunked",
                "TTFT P95, ms",
                "decode-first",
                "P95 against decode-first",
                "%",
                high=-50,
                is_fall=True,
            ),
            Reading(
                "chunked-prefill",
                "chunked",
                "TTFT P95, ms",
                "prefill-first",
                "against prefill-first",
                "%",
                high=-50,
                is_fall=True,
            ),
            Reading("chunked-prefill", "decode-first", "TTFT P99, ms", "chunked", "P99 against decode-first", low=6),
        ),
        why={
            Verdict.PART: "It depends on the base. Where generating comes first, prompts wait for it, and chunks end "
            "that. Where whole prompts come first, first tokens are early, and chunks end the gaps between tokens "
            "instead."
        },
    ),
    PublishedNumber(
        15,
        Question.WAIT,
        "Capacity under a bound on the time between tokens",
        "2.6×",
        "Agrawal et al., Sarathi-Serve (OSDI 2024), Mistral-7B on an A100",
        (Reading("sarathi-capacity", low=2.6, high=2.6),),
        why={
            Verdict.CONFIRMED: "The bound is five decode steps, as in the paper, so the ratio holds on another GPU.",
            Verdict.MORE: "Chunks are sized by time here, for the bound itself, and not by a fixed number of tokens.",
        },
    ),
    PublishedNumber(
        16,
        Question.WAIT,
        "A prompt of 32k tokens, computed whole",
        "200–400 ms before its first token, in which all others stand still",
        "Articles on chunked prefill",
        (Reading("long-prompt"),),
    ),
    PublishedNumber(
        17,
        Question.ORDER,
        "Scheduling cost and queue depth",
        "a step's scheduling takes twice as long when the queue is twice as long",
        "Reports of users, without a single origin",
        (Reading("queue-depth", low=100),),
        is_fault=True,
        why={
            Verdict.AVOIDED: "A step looks at the head of the queue, however many wait behind it. Published would be "
            "100× for 100 times the queue."
        },
    ),
    PublishedNumber(
        18,
        Question.WAIT,
        "Tail latency from preemption",
        "P99 per token 3.8× P50, 70% of it by preemption; above 3× lower the batch or choose victims better",
        "Sun et al., Llumnix (OSDI 2024), LLaMA-7B on an A10; guides",
        (Reading("preemption-tail", "scarce memory", "P99/P50", label="P99/P50 in scarce memory", low=3.8),),
        is_fault=True,
        why={
            Verdict.AVOIDED: "Requests are admitted when they have room to begin, the last one gives way, and its "
            "tokens are computed again in chunks; the wait is in the queue instead."
        },
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
        20,
        Question.ORDER,
        "Learned ranking of answer lengths",
        "mean latency 2.8×, up to 6.5×; throughput +23.7%, +15% and more at high traffic",
        "Fu et al., Learning to Rank (NeurIPS 2024), Llama-3-8B on an A100; articles",
        (Reading("learned-ranking", low=2.8, high=6.5), Reading("ranking-throughput")),
        why={
            Verdict.CONFIRMED: "The gain is in the queue: it needs an overload, and grows with how long it lasts.",
            Verdict.LESS: "The gain is in the queue, and follows from how long the overload lasts.",
        },
    ),
    PublishedNumber(
        21,
        Question.ORDER,
        "The price of a predictor",
        "10,000 pairs, 4–6 hours of traffic; milliseconds a step",
        "Articles on learned ranking",
        (Reading("predictor-cost"),),
    ),
    PublishedNumber(
        22,
        Question.ORDER,
        "Magnus: batches by predicted length",
        "mean latency −22.8%; throughput +66–234%, response time −60–90%",
        "Cheng et al., Magnus (2024), ChatGLM-6B; articles",
        (
            Reading(
                "magnus",
                "dynamic, by predicted length",
                "output tokens/s",
                "static",
                "throughput",
                "%",
                low=66,
                high=234,
            ),
            Reading(
                "magnus",
                "dynamic, by predicted length",
                "response time, ms",
                "static",
                "response time",
                "%",
                low=-90,
                high=-60,
                is_fall=True,
            ),
        ),
        why={
            Verdict.CONFIRMED: "Static batches wait for their longest answer, and batches of one length class do not. "
            "Continuous batching gains more, and needs no prediction.",
            Verdict.PART: "Throughput grows as published. Batches of a class are filled from fewer requests, so at low "
            "load a request waits longer for its batch.",
        },
    ),
    PublishedNumber(
        23,
        Question.ORDER,
        "Scheduling that knows the promises (SLOs)",
        "P99 latency −34%",
        "Surveys of SLO-aware schedulers, without a single origin",
        (
            Reading("slo-tail", "slo", "interactive TTFT P99, ms", "fcfs", "first token", "%", high=-34, is_fall=True),
            Reading("slo-tail", "slo", "interactive E2E P99, ms", "fcfs", "last token", "%", high=-34, is_fall=True),
        ),
        why={
            Verdict.PART: "An order changes who waits, so first tokens come much sooner. The last one of a long answer "
            "does not: most of its time is generating."
        },
    ),
    PublishedNumber(
        24,
        Question.WAIT,
        "Starvation",
        "a priority that rises after 200–500 ms bounds the wait",
        "Guides to serving engines",
        (Reading("starvation"),),
    ),
    PublishedNumber(
        25,
        Question.COST,
        "Tuning of the options",
        "2–3 days by hand; two flags decide between 3× and 5×",
        "Guides to serving engines",
        (Reading("tuning", low=3, high=5),),
        why={
            Verdict.CONFIRMED: "Two flags are worth about as much as published. A search in simulation replaces days.",
            Verdict.MORE: "Two flags decide about more than that here: too small a batch leaves most of the GPU idle. "
            "A search in simulation takes minutes.",
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
        27,
        Question.COST,
        "Speculation, and quantised weights",
        "2–4×, best where memory is the limit",
        "Leviathan et al. (ICML 2023); reports on serving engines",
        (
            Reading("speculation", "1 at once", "ratio", label="1 request", low=2, high=4),
            Reading("speculation", "64 at once", "ratio", label="64"),
        ),
        why={
            Verdict.CONFIRMED: "Alone a request has the weights to itself, and guesses cost little. In a large batch "
            "they cost as much as tokens, so few are made."
        },
    ),
    PublishedNumber(
        28,
        Question.GAIN,
        "Temperature and top-p",
        "a higher temperature spreads lengths more, so continuous batching gains more",
        "Articles on continuous batching",
        (Reading("temperature"),),
    ),
    PublishedNumber(
        29,
        Question.GAIN,
        "Gain against the spread of lengths",
        "large where some answers have 10 and others 1,000 tokens, small where all are alike",
        "Articles on continuous batching",
        (Reading("gain-map"),),
    ),
    PublishedNumber(
        30,
        Question.COST,
        "Cost of serving",
        "spending −50–90% with caching and routing; 3–5× the traffic per GPU",
        "Articles on the cost of serving",
        (
            Reading(
                "cost",
                "cached, routed to its prefix",
                "GPU seconds",
                "no cache",
                "GPU time, cached and routed",
                "%",
                low=-90,
                high=-50,
                is_fall=True,
            ),
            Reading("eras", "continuous, paged, chunked", "to static", label="traffic per GPU", low=3, high=5),
        ),
        why={
            Verdict.CONFIRMED: "Both depend on the traffic: on how much of a prompt others have had before, and on how "
            "much lengths are spread.",
            Verdict.PART: "Both depend on the traffic: on how much of a prompt others have had before, and on how much "
            "lengths are spread. What is generated is never saved.",
        },
    ),
)
