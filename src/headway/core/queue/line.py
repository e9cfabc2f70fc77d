"""Requests in order of arrival. Whoever comes back takes its old place, at a cost that does not grow with the line:
those that were before it have mostly gone, since it had its turn once.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from headway.core.request import Request

Line = OrderedDict[int, Request]
"""By arrival index, and in its order."""


def insert(line: Line, request: Request) -> None:
    """Put a request in its place."""
    index = request.arrival_index
    is_last = not line or next(reversed(line)) < index
    line[index] = request
    if not is_last:
        before = list(takewhile(lambda other: other < index, line))
        for one in (index, *reversed(before)):
            line.move_to_end(one, last=False)


def first_index(line: Line) -> int:
    """Of the earliest arrival; there must be one."""
    return next(iter(line))
