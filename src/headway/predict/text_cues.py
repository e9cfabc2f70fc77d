"""Text cues: a few numbers about how long an answer the last message of a prompt asks for.

Chat templates put markers around messages; the last piece between markers that is more than a role's name is the
current question. Its words and pairs of words are looked up in short lists of phrases that ask for long or short
answers. "Three paragraphs" and "in 50 words" are turned into a rough number of tokens.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

MOST_CHARS = 4_000
"""Of longer texts only the end is read."""
ASK_CHARS = 1_200
"""What is asked mostly stands at the beginning or at the end of a message: of longer ones, halves of this are read."""
MOST_AMOUNT_TOKENS = 10_000

_MARKERS = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>")
_ROLES = ("system", "user", "assistant", "model", "tool")
_WORD = re.compile(r"[a-z']+|```|\$")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")

_NUMBERS = {"one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_NUMBERS |= {"nine": 9, "ten": 10, "twenty": 20}
_TOKENS_PER_UNIT = {"word": 1.3, "sentence": 25, "paragraph": 90, "section": 100, "line": 12, "item": 15}
_TOKENS_PER_UNIT |= dict.fromkeys(("bullet", "point"), 25)
_TOKENS_PER_UNIT |= dict.fromkeys(("example", "way", "reason", "tip", "step"), 30)
_AMOUNT = re.compile(
    rf"\b(\d{{1,4}}|{'|'.join(_NUMBERS)})\+?[ -]{{1,3}}(?:[a-z]{{1,20}} )?({'|'.join(_TOKENS_PER_UNIT)})s?\b"
)

_LISTS = {
    "list": "list lists bullet bullets",
    "write": "write compose draft create generate",
    "essay": "essay article blog report resume",
    "poem": "poem haiku song lyrics rap limerick",
    "story": "story novel script plot",
    "letter": "letter email speech proposal",
    "translate": "translate translation translated",
    "code": "``` code function python program sql",
    "summary": "summary summarize summarise summarized tldr",
    "explain": "explain explanation describe description why how",
    "count": "how+many how+much how+long how+old how+far",
    "choice": "which true+or yes+or classify correct",
    "who": "who when where what+is name+of",
    "brief": "brief briefly short concise one+word one+sentence only",
    "detail": "detail details detailed comprehensive thorough step+by at+least",
    "rewrite": "rewrite rephrase paraphrase improve edit",
    "example": "example examples such+as instance",
    "compare": "compare comparison difference differences different differ versus pros advantage advantages",
    "steps": "step steps guide instruction instructions plan recipe itinerary",
    "format": "table json xml markdown format csv",
    "thanks": "thank thanks great got+it interesting sounds",
    "advice": "you+think opinion recommend recommendations suggest suggestions should+i advice",
    "self": "i i'm my",
    "you": "you",
    "denial": "no not don't isn't wrong incorrect mistake",
    "sum": "calculate solve total cost costs percent equation $",
    "word": "synonym synonyms antonym word sentence",
    "limit": "less+than at+most no+more fewer limit limited exactly within",
    "again": "again another more else also",
    "without": "do+not avoid without",
}
_FIRST = (
    "what how why can could is are do does did who when where which write give tell explain i and the if please list "
    "create now so a"
)


def _places(lists: Iterable[str]) -> dict[str, list[int]]:
    """In which of the lists each word or pair of words is."""
    places: dict[str, list[int]] = {}
    for place, words in enumerate(lists):
        for word in words.split():
            places.setdefault(word.replace("+", " "), []).append(place)
    return places


_CUES_OF = _places(_LISTS.values())
_FIRST_WORDS = {word: float(place) for place, word in enumerate(_FIRST.split())}

CUE_NAMES = (
    "log_chars",
    "log_newlines",
    "digit_share",
    "upper_share",
    "foreign_share",
    "log_questions",
    "log_commas",
    "log_sentences",
    "has_quote",
    "has_colon",
    "ends_with_question",
    "ends_with_stop",
    "log_last_line_chars",
    "log_amount",
    "first_word",
    *(f"says_{name}" for name in _LISTS),
)
NUM_CUES = len(CUE_NAMES)


def text_cues(text: str) -> tuple[float, ...]:
    """One number per name of `CUE_NAMES`, rounded so that they are the same after a trip through a log."""
    message = last_message(text[-MOST_CHARS:])
    ask = _ask(message).lower()
    words = _WORD.findall(ask)
    size = max(len(message), 1)
    numbers = (
        math.log1p(len(message)),
        math.log1p(message.count("\n")),
        sum(map(str.isdigit, message)) / size,
        sum(map(str.isupper, message)) / size,
        1 - len(message.encode("ascii", "ignore")) / size,
        math.log1p(message.count("?")),
        math.log1p(message.count(",")),
        math.log1p(len(_SENTENCE_END.findall(ask))),
        float('"' in message),
        float(":" in message),
        float(message.endswith("?")),
        float(message.endswith(".")),
        math.log1p(len(message) - message.rfind("\n") - 1),
        math.log1p(_amount(ask)),
        _FIRST_WORDS.get(words[0], -1.0) if words else -1.0,
        *_said(words),
    )
    return tuple(round(number, 4) for number in numbers)


def last_message(text: str) -> str:
    """The text between the last markers, without the role that will answer and without its own role's name."""
    for piece in reversed(_MARKERS.split(text)):
        first, _, rest = piece.strip().partition("\n")
        message = rest.strip() if first in _ROLES else piece.strip()
        if message:
            return message
    return ""


def _ask(message: str) -> str:
    if len(message) <= ASK_CHARS:
        return message
    return f"{message[: ASK_CHARS // 2]}\n{message[-ASK_CHARS // 2 :]}"


def _said(words: list[str]) -> list[float]:
    found = [0.0] * len(_LISTS)
    for term in {*words, *map(" ".join, itertools.pairwise(words))} & _CUES_OF.keys():
        for index in _CUES_OF[term]:
            found[index] = 1.0
    return found


def _amount(ask: str) -> float:
    """The largest number of tokens that the text asks for; 0 if it names none."""
    amounts = [
        (int(number) if number.isdigit() else _NUMBERS[number]) * _TOKENS_PER_UNIT[unit]
        for number, unit in _AMOUNT.findall(ask)
    ]
    return min(max(amounts, default=0.0), MOST_AMOUNT_TOKENS)
