"""How many tokens one step may still compute."""

from __future__ import annotations


class TokenBudget:
    """Counts down from the step's limit; also knows the most that one request may take of it."""

    __slots__ = ("left", "max_chunk_tokens")

    def __init__(self, limit: int, max_chunk_tokens: int | None = None) -> None:
        self.left = limit
        self.max_chunk_tokens = limit if max_chunk_tokens is None else max_chunk_tokens

    def offer(self, num_remaining_tokens: int) -> int:
        """The most that a request with so many tokens to go may take now."""
        return min(num_remaining_tokens, self.left, self.max_chunk_tokens)

    def cap(self, num_tokens: int) -> None:
        """From here on, spend no more than this."""
        self.left = min(self.left, num_tokens)

    def take(self, num_tokens: int) -> None:
        """Spend part of the budget."""
        if not 0 <= num_tokens <= self.left:
            raise RuntimeError(f"cannot take {num_tokens} tokens from a budget of {self.left}")
        self.left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """Give back what a request took before it was preempted in the same step."""
        self.left += num_tokens
