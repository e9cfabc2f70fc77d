"""Which names are those of hub models, and which files of a repository are read."""

from __future__ import annotations

import pytest

from headway.errors import ConfigError, HeadwayError, ModelNotFoundError, UnsupportedModelError
from headway.loader.hub.choice import choose
from headway.loader.hub.model_id import HubModel

FOLDER = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
BESIDE = [
    "README.md",
    ".gitattributes",
    "pytorch_model.bin",
    "onnx/config.json",
    "original/model.safetensors",
    "LICENSE",
]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
GGUFS = ["Small-1B-Q4_K_M.gguf", "Small-1B-UD-Q4_K_XL.gguf", "Small-1B-IQ4_XS.gguf", "Small-1B-bf16.gguf"]
GGUFS_BESIDE = ["mmproj-Small-1B-F16.gguf", "imatrix.gguf", "README.md"]


@pytest.mark.parametrize(
    ("name", "repo", "part"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("gpt2", "gpt2", None),
        ("a/b:Q4_K_M", "a/b", "Q4_K_M"),
        ("a/b:Some file (1).gguf", "a/b", "Some file (1).gguf"),
        ("a/b/c", None, None),
        ("models/a.gguf", None, None),
        ("a/b.safetensors", None, None),
        ("../secret", None, None),
        ("a/..", None, None),
        ("a--b/c", None, None),
        ("a/b:../c", None, None),
        ("./a", None, None),
        ("", None, None),
    ],
)
def test_names(name: str, repo: str | None, part: str | None) -> None:
    model = HubModel.parse(name)
    assert (None, None) if model is None else (model.repo, model.part) == (repo, part)
    assert (model is None) == (repo is None)


@pytest.mark.parametrize(
    ("revision", "is_valid"), [("v1.0", True), ("refs/pr/3", True), ("../main", False), ("a b", False), ("", False)]
)
def test_revisions(revision: str, is_valid: bool) -> None:
    """A revision becomes part of a path, and of an address."""
    if is_valid:
        model = HubModel.parse("a/b", revision)
        assert model is not None
        assert model.revision == revision
        assert model.command == f"headway pull a/b --revision {revision}"
    else:
        with pytest.raises(ConfigError, match="is not the name of a branch"):
            HubModel.parse("a/b", revision)


@pytest.mark.parametrize(
    ("name", "files", "load_format", "small", "weights"),
    [
        ("a/b", FOLDER + BESIDE, "auto", set(FOLDER) - {"model.safetensors"}, ["model.safetensors"]),
        ("a/b", [*FOLDER, *SHARDS], "auto", set(FOLDER) - {"model.safetensors"}, ["model.safetensors"]),
        ("a/b", ["config.json", *SHARDS, "consolidated.safetensors"], "auto", {"config.json"}, SHARDS),
        (
            "a/b",
            ["config.json", "tokenizer.model", "vocab.json", "model.safetensors", "additional_chat_templates/x.jinja"],
            "auto",
            {"config.json", "tokenizer.model", "additional_chat_templates/x.jinja"},
            ["model.safetensors"],
        ),
        ("a/b", [*FOLDER, *GGUFS], "auto", set(FOLDER) - {"model.safetensors"}, ["model.safetensors"]),
        ("a/b", [*FOLDER, GGUFS[0]], "gguf", set(), [GGUFS[0]]),
        ("a/b", ["config.json", "tokenizer.json", GGUFS[0]], "auto", set(), [GGUFS[0]]),
        ("a/b", [GGUFS[0], *GGUFS_BESIDE], "auto", set(), [GGUFS[0]]),
        ("a/b:q4_k_m", GGUFS, "auto", set(), [GGUFS[0]]),
        ("a/b:UD-Q4_K_XL", GGUFS, "auto", set(), [GGUFS[1]]),
        ("a/b:BF16", GGUFS, "gguf", set(), [GGUFS[3]]),
        (f"a/b:{GGUFS[2]}", [*FOLDER, *GGUFS], "auto", set(), [GGUFS[2]]),
    ],
)
def test_chosen_files(name: str, files: list[str], load_format: str, small: set[str], weights: list[str]) -> None:
    model = HubModel.parse(name)
    assert model is not None
    choice = choose(model, files, load_format)
    assert (set(choice.small), choice.known_weights) == (small, tuple(weights))
    assert choice.is_gguf == weights[0].endswith(".gguf")


def test_index_names_the_weights() -> None:
    choice = choose(
        HubModel("a/b"), ["config.json", "model.safetensors.index.json", *SHARDS, "other.safetensors"], "auto"
    )
    assert choice.known_weights is None
    assert "model.safetensors.index.json" in choice.small


@pytest.mark.parametrize(
    ("name", "files", "load_format", "error", "parts"),
    [
        ("a/b", GGUFS, "auto", ModelNotFoundError, ["has several GGUF files", "a/b:Q4_K_M (2.5 GB)", "a/b:IQ4_XS"]),
        ("a/b:Q8_0", GGUFS, "auto", ModelNotFoundError, ["has no GGUF file 'Q8_0'", "a/b:bf16"]),
        (
            "a/b:Q4_K_M",
            ["One-Q4_K_M.gguf", "Two-Q4_K_M.gguf"],
            "auto",
            ModelNotFoundError,
            ["a/b:One-Q4_K_M.gguf", "a/b:Two-Q4_K_M.gguf"],
        ),
        (
            "a/b:Q8_0",
            ["Big-Q8_0-00001-of-00002.gguf", "Big-Q8_0-00002-of-00002.gguf"],
            "auto",
            UnsupportedModelError,
            ["Big-Q8_0-00001-of-00002.gguf", "llama-gguf-split"],
        ),
        ("a/b:Q8_0", GGUFS, "safetensors", ConfigError, ["load_format is 'safetensors'"]),
        ("a/b", FOLDER, "gguf", ModelNotFoundError, ["a/b has no GGUF file"]),
        ("a/b", ["README.md"], "auto", ModelNotFoundError, ["no config.json and no GGUF file"]),
        ("a/b", ["config.json"], "auto", ModelNotFoundError, ["no weights"]),
        ("a/b", ["config.json", "pytorch_model.bin"], "auto", UnsupportedModelError, ["pickle files"]),
        ("a/b", GGUFS, "safetensors", ModelNotFoundError, ["no config.json"]),
    ],
)
def test_refused(name: str, files: list[str], load_format: str, error: type[HeadwayError], parts: list[str]) -> None:
    model = HubModel.parse(name)
    assert model is not None
    with pytest.raises(error) as caught:
        choose(model, files, load_format, dict.fromkeys(files, 2_500_000_000))
    for part in parts:
        assert part in str(caught.value)
