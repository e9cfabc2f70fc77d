"""Published numbers about requests and operators: waiting, order, cost."""

from __future__ import annotations

from collections.abc import Sequence

from headway_lab.claims.published_number import PublishedNumber, Question, Reading, Verdict

SERVICE: Sequence[PublishedNumber] = (
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
        (
            Reading(
                "long-prompt",
                "whole",
                "longest gap of the others, ms",
                label="the others stand still",
                unit="ms",
                low=200,
                high=400,
            ),
            Reading("long-prompt", "whole", "TTFT of the long prompt, ms", label="its first token", unit="ms"),
        ),
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
        (Reading("preemption-tail", "scarce memory", "P99/P50", low=3.8),),
        is_fault=True,
        why={
            Verdict.AVOIDED: "Requests are admitted when they have room to begin, the last one gives way, and its "
            "tokens are computed again in chunks; the wait is in the queue instead."
        },
    ),
    PublishedNumber(
        20,
        Question.ORDER,
        "Learned ranking of answer lengths",
        "mean latency 2.8×, up to 6.5×; throughput +23.7%, +15% and more at high traffic",
        "Fu et al., Learning to Rank (NeurIPS 2024), Llama-3-8B on an A100; articles",
        (
            Reading("learned-ranking", label="mean latency", low=2.8, high=6.5),
            Reading("ranking-throughput", label="answered per second, more by", unit="%", low=15, high=23.7),
        ),
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
        (Reading("predictor-price", high=10_000, is_fall=True),),
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
            Reading("magnus-latency", label="mean latency", unit="%", high=-22.8, is_fall=True),
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
        (Reading("starvation", high=500, is_fall=True),),
        why={
            Verdict.CONFIRMED: "Shortest first waits for no one; a guard by time bounds how much longer than in order "
            "of arrival a request waits.",
        },
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
        27,
        Question.COST,
        "Speculation, and quantised weights",
        "2–4×, best where memory is the limit",
        "Leviathan et al. (ICML 2023); reports on serving engines",
        (
            Reading("speculation", "1 at once", "ratio", label="1 request", low=2, high=4),
            Reading("speculation", "64 at once", "ratio", label="64"),
            Reading("weight-formats", low=2, high=4),
        ),
        why={
            Verdict.CONFIRMED: "Alone a request has the weights to itself, and guesses cost little. In a large batch "
            "they cost as much as tokens, so few are made.",
            Verdict.PART: "Guesses make a lone request as fast as published. Weights of half or a quarter of the bytes "
            "gain less than that, since keys, values and activations are read as before.",
        },
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
