"""What a prompt's text says about the length of its answer, as a few numbers. For prompts whose text is at hand."""

from __future__ import annotations

import math
import re

END_CHARS = 400
"""What is asked mostly stands at the end."""
MOST_CHARS = 4_000
"""Of longer texts only the end is looked at."""

_MARKERS = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>")
_AMOUNT = re.compile(
    r"(\d{1,4})\+?[ -]*(?:word|sentence|paragraph|line|bullet|item|point|example|way|reason|tip|step)s?\b"
)

_WORDS = {
    "list": r"\blists?\b|\bbullet",
    "write": r"\bwrite\b|\bcompose\b|\bdraft\b",
    "story": r"\bstory\b|\bessay\b|\bpoem\b|\bblog\b|\bsong\b|\bletter\b|\bscript\b",
    "translate": r"\btranslat",
    "code": r"```|\bcode\b|\bfunction\b|\bpython\b|\bprogram\b|\bsql\b",
    "summary": r"\bsummar|\btl;?dr\b",
    "explain": r"\bexplain|\bdescri|\bwhy\b|\bhow\b",
    "count": r"\bhow (?:many|much|long|old|far)\b",
    "choice": r"\bwhich\b|\btrue or false\b|\byes or no\b|\bclassif|\bcorrect\b",
    "who": r"\bwho\b|\bwhen\b|\bwhere\b|\bwhat is\b|\bname of\b",
    "brief": r"\bbrief|\bshort\b|\bconcise|\bone (?:word|sentence)\b|\bonly\b",
    "detail": r"\bdetail|\bcomprehensive|\bthorough|\bstep[ -]by[ -]step\b|\bat least\b",
    "rewrite": r"\brewrite\b|\brephras|\bparaphras|\bimprove\b|\bedit\b",
}
_PATTERNS = tuple(re.compile(pattern) for pattern in _WORDS.values())

CUE_NAMES = (
    "log_chars",
    "log_newlines",
    "digit_share",
    "upper_share",
    "log_questions",
    "ends_with_question",
    "log_last_line_chars",
    "log_amount",
    *(f"says_{word}" for word in _WORDS),
)
NUM_CUES = len(CUE_NAMES)


def text_cues(text: str) -> tuple[float, ...]:
    """One number per name of `CUE_NAMES`, rounded so that they are the same after a trip through a log."""
    body = _MARKERS.sub("\n", text[-MOST_CHARS:]).rstrip()
    body = body.removesuffix("assistant").removesuffix("model").rstrip()
    end = body[-END_CHARS:].lower()
    size = max(len(body), 1)
    amounts = [int(match) for match in _AMOUNT.findall(end)]
    numbers = (
        math.log1p(len(text)),
        math.log1p(body.count("\n")),
        sum(map(str.isdigit, body)) / size,
        sum(map(str.isupper, body)) / size,
        math.log1p(body.count("?")),
        float(body.endswith("?")),
        math.log1p(len(body) - body.rfind("\n") - 1),
        math.log1p(max(amounts, default=0)),
        *(float(pattern.search(end) is not None) for pattern in _PATTERNS),
    )
    return tuple(round(number, 4) for number in numbers)
