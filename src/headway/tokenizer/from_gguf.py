"""A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and sentencepiece BPE ("llama") vocabularies.

The file holds the tokens, their types, and either merges or scores; how text is split into words before merging is only
named (`tokenizer.ggml.pre`), and the rule for each name is kept here. An unknown name is refused: a wrong split gives
wrong tokens without any sign of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.tokenizer.tokenizer import END_TOKENS, Tokenizer, surround_with

_KEY = "tokenizer.ggml."
_SPACE_MARK = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Keys of tokens that end a text, a turn or a message; lists of such tokens; and file separators, which end an answer.
_END_KEYS = (
    *("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids", "eog_token_ids"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _WordSplit:
    """How a named pre-tokenizer cuts text into words, and what else its family does differently.

    `patterns` are applied one after the other, each match becoming a word; `gpt2_words` adds the split of GPT-2.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_words: bool = False
    normalize_nfc: bool = False
    whole_words_first: bool = False
    """Whether a word that is a token stays whole, whatever the merges would give."""
    adds_bos: bool = False
    """Whether a text starts with the bos token if the file does not say."""


def _cased_words(digits: str) -> str:
    letters, symbols = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join([_CONTRACTIONS, letters, digits, symbols, _SPACES])


def _tekken_words() -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+|{lead}{upper}+{lower}*|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = _WordSplit(gpt2_words=True)
_DIGITS_THEN_GPT2 = _WordSplit(single_digits=True, gpt2_words=True)
_LLAMA3 = _WordSplit(patterns=(_cased_words(r"\p{N}{1,3}"),), whole_words_first=True, adds_bos=True)
_QWEN2 = _WordSplit(patterns=(_cased_words(r"\p{N}"),), normalize_nfc=True)
_TEKKEN = _WordSplit(patterns=(_tekken_words(),), whole_words_first=True, adds_bos=True)
_DEEPSEEK_CODER = _WordSplit(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"), single_digits=True)

_WORD_SPLITS: dict[str, _WordSplit] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build from the file's metadata: GGUF key → plain Python value, arrays as lists."""
    kind = metadata.get(_KEY + "model")
    tokens = _list(metadata, "tokens")
    types = _list(metadata, "token_type") if _KEY + "token_type" in metadata else [_TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of kind {kind!r} ({_KEY}model); supported are 'gpt2' and 'llama'"
        )
    _mark_special_tokens(backend, tokens, types)
    named = {
        name: tokens[i] for name, key in _NAMED_TOKENS.items() if (i := _token_id(metadata, key, tokens)) is not None
    }
    surround_with(
        backend,
        first=named.get("bos_token") if metadata.get(_KEY + "add_bos_token", adds_bos) else None,
        last=named.get("eos_token") if metadata.get(_KEY + "add_eos_token", False) else None,
    )
    return Tokenizer(
        backend,
        eos_token_ids=_end_token_ids(metadata, tokens, types),
        bos_token_id=_token_id(metadata, "bos_token_id", tokens),
        special_tokens=named,
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get(_KEY + "pre")
    split = _WORD_SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer is {name!r} ({_KEY}pre); supported are: {', '.join(sorted(_WORD_SPLITS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words_first)
    except Exception as error:  # the library raises plain exceptions, e.g. for a merge of unknown tokens
        raise CorruptModelError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if split.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _list(metadata, "scores")
    if len(scores) != len(tokens):
        raise CorruptModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} token scores")
    unknown = _token_id(metadata, "unknown_token_id", tokens)
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == _TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=_merges_by_score(tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    adds_space = bool(metadata.get(_KEY + "add_space_prefix", True))
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces]) if adds_space else mark_spaces
    )
    steps: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best score first: the order in which sentencepiece joins pieces."""
    mergeable = (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in mergeable}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[token_id], token_id, ids[left], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _mark_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    def added(kind: _TokenType, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, types, strict=True)
            if its_kind == kind and token
        ]

    backend.add_special_tokens(added(_TokenType.CONTROL, special=True) + added(_TokenType.UNKNOWN, special=True))
    backend.add_tokens(added(_TokenType.USER_DEFINED, special=False))


def _end_token_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    declared = [token_id for key in _END_KEYS for token_id in _token_ids(metadata, key, tokens)]
    marked = (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    known = [i for i, kind in enumerate(types) if kind in marked and tokens[i] in END_TOKENS]
    return declared + known


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {"default": metadata.get(prefix)}
    found |= {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def _list(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata.get(_KEY + key)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not len(value):
        raise CorruptModelError(f"the GGUF file has no usable list {_KEY}{key}, which its tokenizer needs")
    return value


def _token_id(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    return next(iter(_token_ids(metadata, key, tokens)), None)


def _token_ids(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> list[int]:
    """The token ids under a key, which may hold one id, a list, or nothing."""
    value = metadata.get(_KEY + key)
    if value is None:
        return []
    found = [int(item) for item in (value if hasattr(value, "__iter__") else [value])]
    if any(not 0 <= token_id < len(tokens) for token_id in found):
        raise CorruptModelError(f"the GGUF file's {_KEY}{key} is {value}, but it has {len(tokens)} tokens")
    return found
