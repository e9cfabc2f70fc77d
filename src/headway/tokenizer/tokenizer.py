"""`Tokenizer`, the one class that turns text into tokens and back, and threads that tokenise beside an event loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import tokenizers
from tokenizers.processors import TemplateProcessing

from headway.errors import HeadwayError, InvalidRequestError
from headway.tokenizer.chat_template import ChatTemplate, check_messages

logger = logging.getLogger(__name__)

_SPACE_MARK = "\u2581"

END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endofturn|>"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "<|return|>", "<|call|>"),
)
"""Special tokens with which models of several families end a turn or a text. A GGUF file declares only one of each
kind, where generation_config.json lists all."""


class InfillTokens(NamedTuple):
    """The special tokens around the two texts between which a model writes."""

    prefix: str
    suffix: str
    middle: str
    end: str | None = None
    """The token with which the model ends such a text, if it is not one of its usual end tokens."""


INFILL_TOKENS = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"),  # CodeLlama
    InfillTokens(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),  # DeepSeek
)
_MARK = "\u263a"
"""Placed before a text so that a tokenizer does not treat it as the beginning of a word."""


class Infill(NamedTuple):
    """A prompt for the text between two others."""

    token_ids: list[int]
    end_token_id: int | None
    """The token that ends the text, in addition to the model's usual end tokens."""


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` (`backend`) and adds what generation needs: end tokens and the chat template.

    `special_tokens` are the named ones that chat templates refer to, e.g. {"bos_token": "<s>"}. `chat_templates` are
    templates by name; "default" is used, or "tool_use" if tools are given and it exists. It may instead be the error
    that reading them raised, which is then raised when a template is needed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | HeadwayError | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = chat_templates if isinstance(chat_templates, HeadwayError) else _compiled(chat_templates)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        base_size: int = backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max([base_size, *(token_id + 1 for token_id in added)])
        decoder = _decoder_steps(backend)
        self._is_byte_level = decoder == ["ByteLevel"]
        self._is_sentencepiece = decoder[:3] == ["Replace", "ByteFallback", "Fuse"] and decoder[3:] in ([], ["Strip"])
        self.has_token_bytes = self._is_byte_level or self._is_sentencepiece
        """Whether each token stands for a fixed sequence of bytes; see `token_bytes`."""
        self.drops_leading_space = self._is_sentencepiece and decoder[3:] == ["Strip"]
        """Whether decoding a whole text drops one space at its start."""
        self._bytes_of: dict[int, bytes] = {}

    def drop_end_tokens_outside(self, vocab_size: int) -> None:
        """Forget end tokens with ids from `vocab_size` on: the model has no logits for them and never chooses them."""
        unknown = [token_id for token_id in self.eos_token_ids if not 0 <= token_id < vocab_size]
        if unknown:
            logger.warning(
                "the tokenizer names end tokens %s, which a model of %d tokens never gives; they are ignored",
                ", ".join(map(str, unknown)),
                vocab_size,
            )
            self.eos_token_ids = tuple(token_id for token_id in self.eos_token_ids if token_id not in unknown)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if the model has one."""
        return self.chat_template_for(has_tools=False)

    def chat_template_for(self, *, has_tools: bool) -> str | None:
        """The chat template for a conversation; conversations with tools may have a separate one."""
        template = self._select_template(has_tools=has_tools)
        return template.source if template else None

    def replace_chat_templates(self, source: str) -> None:
        """Use this template for all conversations, those with tools included."""
        self._chat_templates = _compiled({"default": source})

    def marker_token_id(self, text: str) -> int | None:
        """The token of a marker that grammars must name by id: a special token, or an added token in angle brackets,
        which llguidance treats as special. None for other texts."""
        token_id: int | None = self.backend.token_to_id(text)
        is_bracketed = text.startswith("<") and text.endswith(">") and token_id in self._added_ids
        return token_id if is_bracketed or token_id in self._special_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around it, e.g. a first token.

        Other threads run meanwhile, because encoding a batch of one releases the interpreter lock, unlike
        `backend.encode`.
        """
        if not isinstance(text, str):
            raise _not_text(f"is a {type(text).__name__}")
        try:
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise _not_text("has half of a surrogate pair") from None
        return ids

    @cached_property
    def _infill_ids(self) -> tuple[list[int], int | None] | None:
        """The first family of tokens for filling in the middle that this vocabulary has: its three ids, and the end."""
        for known in INFILL_TOKENS:
            ids = [self.backend.token_to_id(text) for text in (known.prefix, known.suffix, known.middle)]
            found = [token_id for token_id in ids if token_id is not None]
            if len(found) == len(ids):
                return found, None if known.end is None else self.backend.token_to_id(known.end)
        return None

    def encode_infill(self, prefix: str, suffix: str, *, add_special_tokens: bool = True) -> Infill | None:
        """A prompt after which the model writes the text between two others; None if it has no tokens for that."""
        if self._infill_ids is None:
            return None
        (first, second, last), end_token_id = self._infill_ids
        start = [first]
        if add_special_tokens and self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]:
            start = [self.bos_token_id, first]
        before = self.encode(prefix, add_special_tokens=False)
        return Infill([*start, *before, second, *self._encode_inner(suffix), last], end_token_id)

    def _encode_inner(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a line: vocabularies of words would begin it with a space."""
        if not self._is_sentencepiece:
            return self.encode(text, add_special_tokens=False)
        mark = self.encode(_MARK, add_special_tokens=False)
        return self.encode(_MARK + text, add_special_tokens=False)[len(mark) :]

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens with names of their own, e.g. {"bos_token": "<s>"}."""
        return {name: text for name, text in self._special_tokens.items() if isinstance(text, str)}

    def special_token_ids(self, most: int) -> dict[str, int]:
        """Special tokens and their ids, those with the lowest ids first."""
        named = {token_id: self.backend.id_to_token(token_id) for token_id in sorted(self._special_ids)[:most]}
        return {text: token_id for token_id, text in named.items() if text is not None}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 become U+FFFD. Other threads run meanwhile, as with `encode`."""
        text: str = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a longer text; "" for an id without a token."""
        if self.has_token_bytes:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return ""
        text = self.decode([token_id], skip_special_tokens=False)
        return " " + text if piece.startswith(_SPACE_MARK) and not text.startswith(" ") else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """The bytes one token stands for (only if `has_token_bytes`); b"" for an id without a token."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        piece: str | None = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace(_SPACE_MARK, " ").encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text of a conversation. `extra` reaches the template, e.g. `tools` or `enable_thinking`."""
        template = self._select_template(has_tools=bool(extra.get("tools")))
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template: send a plain prompt instead of messages", param="messages"
            )
        # As in transformers, values that are not given are none, not undefined: templates distinguish the two.
        given = {"tools": None, "documents": None, **self._special_tokens, **extra}
        variables = {**given, "add_generation_prompt": add_generation_prompt}
        return template.render(messages=check_messages(messages), **variables)

    def _select_template(self, *, has_tools: bool) -> ChatTemplate | None:
        templates = self._chat_templates
        if isinstance(templates, HeadwayError):
            raise templates
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        return templates.get("default") or next(iter(templates.values()), None)


def _compiled(sources: Mapping[str, str] | None) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(text) for name, text in (sources or {}).items()}


def surround_with(backend: tokenizers.Tokenizer, *, first: str | None, last: str | None) -> None:
    """Make `backend` put these tokens before and after each text that it encodes with special tokens."""
    named = [token for token in (first, last) if token is not None]
    parts = [f"{first}:0"] * (first is not None) + ["$A:0"] + [f"{last}:0"] * (last is not None)
    second = [f"{first}:1"] * (first is not None) + ["$B:1"] + [f"{last}:1"] * (last is not None)
    backend.post_processor = TemplateProcessing(
        single=parts,
        pair=parts + second,
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(named)],
    )


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The distinct token sequences of `words`.

    A word is banned as it is spelled at the start of a text and, since most vocabularies have other tokens for it
    there, as it is spelled after a space.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for spelling in (bare, " " + bare):
            sequences[tuple(tokenizer.encode(spelling, add_special_tokens=False))] = None
    sequences.pop((), None)
    return [list(tokens) for tokens in sequences]


def _not_text(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"text to encode must be a string of whole characters; this {what}")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's steps; a plain space replacement is "Replace", a plain one-space strip "Strip"."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names: list[str] = []
    for step in steps:
        plain = {
            "Replace": step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " ",
            "Strip": (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0),
        }
        names.append(step["type"] if plain.get(step["type"], True) else f"special {step['type']}")
    return names


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in that byte-level vocabularies use for each byte: the byte's own character where that is
    visible, else one of the characters from U+0100 on, in order."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + place): b for place, b in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


# ---- beside an event loop --------------------------------------------------------------------------------------------

SHORT_CHARS = 256
"""Up to this size, text is tokenised in the calling thread, in 0.2 ms, or 0.6 ms if every character is a token."""
LONG_CHARS = 16_384
"""Beyond this size, text is tokenised by a thread reserved for long texts."""
IDS_PER_CHAR = 16
"""How many token ids are checked in the time it takes to tokenise one character."""

_T = TypeVar("_T")


class TokenizerThreads:
    """Runs tokeniser work off the event loop, which goes on even if a long prompt takes a second.

    up to 256 characters     in the calling thread: some tenths of a millisecond, less than two thread switches
    up to 16,384 characters  `num_threads` threads
    more                     one thread, so that ordinary prompts never wait behind a long text
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._thread_for_long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def run(self, work: Callable[[], _T], *, num_chars: int) -> _T:
        """Run `work`, which takes about as long as tokenising `num_chars` characters, and return its result."""
        if num_chars <= SHORT_CHARS:
            return work()
        threads = self._threads if num_chars <= LONG_CHARS else self._thread_for_long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """Take no more work. Can be called again."""
        for threads in (self._threads, self._thread_for_long):
            threads.shutdown(wait=False, cancel_futures=True)
