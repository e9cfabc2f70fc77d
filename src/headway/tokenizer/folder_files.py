"""Reads the files around tokenizer.json, with errors that name the file, and logs which keys are not used."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import CorruptModelError, ModelNotFoundError

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"

_TOKEN_LISTS = {"additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"}
_TOKENIZER_KEYS = {
    *("added_tokens_decoder", "chat_template", "split_special_tokens", *_TOKEN_LISTS),
    # tokenizer.json decides these
    *("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "normalization", "legacy", "from_slow"),
    *("sp_model_kwargs", "errors", "byte_fallback", "unk_id", "fix_mistral_regex", "trim_offsets", "strip_accents"),
    *("tokenize_chinese_chars", "vocab_file", "merges_file", "tokenizer_file", "fast_tokenizer_files", "spm_file"),
    # of lengths, padding and other callers
    *(
        "model_max_length",
        "max_len",
        "max_length",
        "stride",
        "padding",
        "padding_side",
        "truncation",
        "truncation_side",
    ),
    *("truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "model_input_names", "processor_class"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "use_default_system_prompt", "verbose"),
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "response_schema"),
    *("response_template", "chat_control_tokens"),
    # of the class, and where it was saved
    *("tokenizer_class", "auto_map", "backend", "init_inputs", "name_or_path", "special_tokens_map_file", "use_fast"),
    *("is_local", "local_files_only", "device_map", "trust_remote_code", "revision", "cache_dir", "files_loaded"),
    *("transformers_version", "tokenizer_type", "return_token_type_ids"),
}
_GENERATION_KEYS = {
    "eos_token_id",
    # Each request says these itself, and transformers' own calls the rest.
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "do_sample", "max_length"),
    *("max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "length_penalty"),
    *("early_stopping", "bos_token_id", "pad_token_id", "use_cache", "cache_implementation", "cache_config"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    *("transformers_version", "_from_model_config", "disable_compile", "compile_config", "trust_remote_code"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("assistant_early_exit", "speculation_type", "use_mtp", "prefill_chunk_size", "continuous_batching_config"),
}
_USED_KEYS: Mapping[str, set[str]] = {
    TOKENIZER_CONFIG: _TOKENIZER_KEYS,
    SPECIAL_TOKENS_MAP: _TOKEN_LISTS,
    GENERATION_CONFIG: _GENERATION_KEYS,
}
_LEAVES_OUT: tuple[Any, ...] = (None, False, [], {})
"""Values with which a key has no effect."""


def read_text(file: Path) -> str:
    """A text file, which is UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptModelError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ModelNotFoundError(f"{file} cannot be read: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a file with a JSON object; empty if there is no file. Keys that are not used are logged."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{file} should hold a JSON object, not a {type(content).__name__}")
    used = _USED_KEYS.get(file.name)
    if used is not None:
        _log_unused(file, content, used)
    return content


def _log_unused(file: Path, content: Mapping[str, Any], used: set[str]) -> None:
    unused = [
        key
        for key, value in content.items()
        if key not in used
        and value not in _LEAVES_OUT
        and not (key.endswith("_token") and isinstance(value, (str, dict)))
    ]
    if unused:
        logger.warning("%s has keys that are not used: %s", file, ", ".join(sorted(unused)))
