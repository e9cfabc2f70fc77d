"""What the demo asks: a dozen requests of very different lengths, arriving one after another."""

from __future__ import annotations

from dataclasses import dataclass


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
