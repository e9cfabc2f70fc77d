"""`headway demo`: shows how a dozen requests of very different lengths share one batch.

The KV cache and the token budget are small on purpose, so that everything interesting happens within seconds: requests
are queued, a long prompt is prefilled in chunks beside other requests' decodes, and blocks fill up and are freed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headway.cli.batch_watch import BatchWatch, WatchedRequest
from headway.config import EngineConfig
from headway.console.flags import add_flags, chosen, engine_flags, number
from headway.errors import ConfigError
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from headway.engine.llm_engine import LLMEngine

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_chunk_tokens": 48,
    "num_kv_blocks": 112,
}
SHOWN_ANSWERS = ("capital", "python")
MAX_PACE_S = 60.0


class BatchView(Protocol):
    """Receive each arrival and each step, and draw them."""

    def arrived(self, request: WatchedRequest) -> None: ...

    def stepped(self, watch: BatchWatch) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="Plain lines, as without a terminal.")
    parser.add_argument(
        "--pace", type=number(), default=0.0, metavar="SECONDS", help="Shortest time of a step, to watch at leisure."
    )
    add_flags(parser, engine_flags(DEFAULTS))


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.pace <= MAX_PACE_S:
        raise ConfigError(f"--pace must be from 0 to {MAX_PACE_S:g} seconds, not {arguments.pace:g}.")
    config = demo_config(chosen(arguments, engine_flags()))

    from rich.console import Console

    from headway.cli.live_view import LiveView, PlainView
    from headway.console.loading import load_engine, model_title, stderr_console

    console = Console(highlight=False)
    engine = load_engine(config, stderr_console())
    view_class = LiveView if console.is_terminal and not arguments.plain else PlainView
    with view_class(console, model_title(config)) as view:
        watch = run_demo(engine, view, pace_s=arguments.pace)
    show_results(watch, console)
    return 0


def demo_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's options: the given ones override the demo's. A given memory size replaces the block count."""
    defaults = {**DEFAULTS, "num_kv_blocks": None} if "kv_cache_memory" in options else DEFAULTS
    return EngineConfig.from_options(**{**defaults, **options})


def run_demo(engine: LLMEngine, view: BatchView, *, pace_s: float = 0.0) -> BatchWatch:
    """Run all requests to their end, each arriving before its step."""
    watch = BatchWatch(
        [WatchedRequest(request.name, request.max_tokens) for request in REQUESTS],
        token_budget=engine.config.scheduler.max_num_batched_tokens,
    )
    expected = list(REQUESTS)
    while expected or engine.has_unfinished_requests():
        while expected and (watch.num_steps >= expected[0].arrival_step or not engine.has_unfinished_requests()):
            _arrive(engine, watch, view, expected.pop(0))
        step = engine.step()
        watch.stepped(step.report, step.outputs, _block_tables(engine), _cached_blocks(engine))
        view.stepped(watch)
        time.sleep(max(0.0, pace_s - step.report.duration_s))
    return watch


def _block_tables(engine: LLMEngine) -> dict[str, tuple[int, ...]]:
    kv_cache = engine.core.scheduler.kv_cache
    return {request_id: kv_cache.block_table(request_id) for request_id in kv_cache.holdings}


def _cached_blocks(engine: LLMEngine) -> set[int]:
    cache = engine.core.scheduler.kv_cache.prefix_cache
    return {block.block_id for block in cache or () if block.is_idle}


def _arrive(engine: LLMEngine, watch: BatchWatch, view: BatchView, request: DemoRequest) -> None:
    token_ids = engine.preparer.chat_token_ids([{"role": "user", "content": request.question}])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=request.max_tokens)
    engine.add_request(request.name, token_ids, params)
    watch.arrived(request.name, num_prompt_tokens=len(token_ids))
    view.arrived(watch.requests[request.name])


def show_results(watch: BatchWatch, console: Console) -> None:
    """The closing table and some of the answers."""
    from rich.text import Text

    from headway.cli.live_view import summary_table

    console.print()
    console.print(summary_table(watch.summary()))
    for request in REQUESTS:
        if request.name in SHOWN_ANSWERS:
            question = request.question.split("\n", 1)[0]
            answer = watch.requests[request.name].text.strip()
            console.print(Text.assemble("\n", (f"{request.name}: {question}", "bold"), f"\n{answer}"))


@dataclass(frozen=True)
class DemoRequest:
    """One question, how long its answer may be, and before which step it arrives."""

    name: str
    question: str
    max_tokens: int
    arrival_step: int


_TRAM_STORY = """\
The night tram of Harrow Quay runs once an hour, and for thirty-one years Ines Ferreira drove it. She knew the
line the way a pianist knows a scale: the long climb past the brewery, the bend at Saint Alma's where the
rails sing, the flat mile along the docks where a driver can see the lights of ships and, on clear nights,
their reflections. She carried bakers, nurses, card players, and once a man with a swan in a laundry basket
who paid for two.

In the winter of the great fog the control room asked all drivers to stop at dusk. Nobody could see the
signals. Ines telephoned from the depot and said that the hospital changed shifts at ten, that forty people
would be standing at the Mercy Street stop, and that fog had never yet pushed a tram off its rails. The
controller, a careful young man called Tobias Lund, said he could not allow it. Ines said that she understood,
hung up, and asked the depot for a bell.

It was the bell of a fishing boat, green with age, that somebody had hung above the canteen door. She tied it
to the front of car 17 with a length of washing line. Then she drove at the pace of a walking child, ringing
the bell with a cord through the window, and at every corner the fog rang back. That was what she had counted
on. Brick answers quickly, she used to say, water answers late, and an open street does not answer at all. By
the third stop she was steering by echoes, and by the fifth her passengers had joined in, calling out the
names of the shops they could not see.

At Mercy Street there were not forty people but sixty-two. Some had been waiting since the shift before. They
climbed in without a word, because in fog everyone whispers, and a surgeon who had been awake for twenty hours
fell asleep against the ticket machine. Ines rang the bell twice, which means go, and turned toward the docks.

On the flat mile she heard an answer where no answer should have been. Brick, close, straight ahead. She
stopped the tram so gently that the surgeon did not wake. She took the lamp and walked along the rail,
counting sleepers, and after forty of them she found a coal wagon that had rolled out of the freight yard and
stood across the line, black, wet and perfectly invisible. At the usual speed car 17 would have reached it in
nine seconds.

It took the passengers a quarter of an hour to push the wagon back. Sixty-two people in their night coats
leaned on it together, the bakers counting aloud, and it moved a hand's breadth at a time. When it was done
they stood for a moment in the white dark, pleased and rather cold, and somebody began to laugh, and then all
of them did. Ines wrote one line in the log book: delayed fifteen minutes, obstacle removed by passengers, no
tickets charged.

In the morning the fog lifted and the transport office sent for her. Tobias Lund was there, and so was the
director, who had a speech prepared about rules. He had reached the second paragraph when the door opened and
the surgeon came in with his hat in his hands. He had not slept at home, he said. He had gone back to work,
because a child had been brought in at eleven, and there had been nobody else. The child was doing well. He
thought they should know how he had got there.

The director folded his speech and put it into his pocket. After a while he asked what the office could do to
make the line safer in the fog. Ines had been thinking about that. Hang a bell at every bend, she said, each
with a voice of its own, so that a driver always knows where she is. And lock the brakes of the coal wagons.
And, said Tobias Lund from his corner, let the driver decide, because she is the one who is there.

All three were done before the spring. There are eleven bells on the line now, and people in Harrow Quay set
their clocks by them. The oldest hangs at the docks, green with age. When Ines retired they asked her what she
wanted as a gift, and she said that she would like, just once, to ride the whole line as a passenger and not
be told where she was. So they bandaged her eyes, as a joke, and drove her from end to end on a clear bright
night, and she named every street from the sound of it, and was wrong only once, where a new bakery had opened
and the air had become soft with flour.
"""

_MINUTES = """\
Minutes of the allotment society. Present: nine members and a dog. The water butts are full again after the
rain. Mr Okafor reported that the shed door has been mended and thanked Lena for the hinges. The price of seed
potatoes has gone up by a third; it was agreed to order together in January. The hedge on the north side will
be cut on the second Saturday of next month, and everyone is asked to bring gloves. A badger has been seen.
Nobody minds the badger. The summer fair made two hundred and twelve pounds, of which eighty will go to new
hoses and the rest is kept for the roof. The next meeting is on the first Tuesday at seven, in the library,
because the hall is being painted.
"""

REQUESTS = (
    DemoRequest("capital", "What is the capital of Portugal? Answer in one sentence.", 24, 0),
    DemoRequest("sky", "Explain to a ten-year-old why the sky is blue.", 150, 0),
    DemoRequest("haiku", "Write a haiku about rain on a tin roof.", 40, 0),
    DemoRequest("pancakes", "Give me a simple recipe for pancakes, with numbered steps.", 180, 6),
    DemoRequest("rainbow", "Name the colours of the rainbow.", 48, 12),
    DemoRequest(
        "story", "Read this story, then say in two or three sentences what it is about.\n\n" + _TRAM_STORY, 96, 24
    ),
    DemoRequest("python", "Write a Python function that reverses a string, and explain it briefly.", 140, 30),
    DemoRequest("sum", "What is 17 plus 25?", 20, 34),
    DemoRequest("minutes", "Who mended the shed door, and when is the next meeting?\n\n" + _MINUTES, 60, 40),
    DemoRequest("moon", "Why does the Moon always show us the same side?", 120, 46),
    DemoRequest("thanks", "Write a short thank-you note to a neighbour who watered my plants.", 90, 70),
    DemoRequest("joke", "Tell me a short joke about a librarian.", 48, 90),
)
