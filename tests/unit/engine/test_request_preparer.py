"""What programs may give as a prompt, and which token ids get past the edge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import LLM, RequestFailedError, SamplingParams
from headway.core.request_options import RequestOptions
from headway.engine.request_preparer import RequestPreparer, core_id
from headway.errors import InvalidRequestError
from tests.stress.llm_stress import llm_of
from tests.unit.engine_process.small_engine import create_engine
from tests.unit.models.tiny import VOCAB_SIZE, hf_model, save_folder
from tests.unit.no_model import all_outputs
from tests.unit.tokenizer.small import trained_backend

PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def llm() -> LLM:
    """Without a model: the n-th token of an answer is the n-th letter."""
    return llm_of(create_engine({}))


# ---- prompts ------------------------------------------------------------------------------------------------------

IDS = [5, 6, 7]
SAME_IDS: dict[str, Callable[[], Any]] = {
    "list": lambda: [5, 6, 7],
    "tuple": lambda: (5, 6, 7),
    "range": lambda: range(5, 8),
    "dict": lambda: {"prompt_token_ids": [5, 6, 7]},
    "dict with an array": lambda: {"prompt_token_ids": np.array([5, 6, 7])},
    "int64 tensor": lambda: torch.tensor([5, 6, 7]),
    "int32 tensor": lambda: torch.tensor([5, 6, 7], dtype=torch.int32),
    "array": lambda: np.array([5, 6, 7]),
    "uint16 array": lambda: np.array([5, 6, 7], dtype=np.uint16),
    "list of tensor elements": lambda: list(torch.tensor([5, 6, 7])),
    "list of array elements": lambda: list(np.array([5, 6, 7])),
}


@pytest.mark.parametrize("form", SAME_IDS)
def test_token_ids_in_any_form(llm: LLM, form: str) -> None:
    make = SAME_IDS[form]
    assert [output.prompt_token_ids for output in llm.generate(make(), PARAMS)] == [IDS]
    assert [output.prompt_token_ids for output in llm.generate([make(), "the", make()], PARAMS)][::2] == [IDS, IDS]
    assert next(iter(llm.stream(make(), PARAMS))).prompt_token_ids == IDS


def test_a_dict_is_a_prompt(llm: LLM) -> None:
    """Not the words that are its keys."""
    text = "The quick fox"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, {"prompt": text}, {"prompt": text, "multi_modal_data": None}]
    for outputs in ([llm.generate(form, PARAMS)[0] for form in forms], llm.generate(forms, PARAMS)):
        assert [output.prompt_token_ids for output in outputs] == [ids] * 3
        assert [output.prompt for output in outputs] == [text] * 3
    assert [output.prompt for output in llm.generate(np.array(["The", "quick"]), PARAMS)] == ["The", "quick"]
    both = llm.generate({"prompt": "shown", "prompt_token_ids": IDS}, PARAMS)[0]
    assert (both.prompt, both.prompt_token_ids) == ("shown", IDS)


def test_a_salt_in_a_dict_is_that_of_its_request(llm: LLM) -> None:
    prompt = list(range(50))
    first, same, other, without = (
        llm.generate(form, PARAMS, cache_salt=salt)[0].num_cached_tokens
        for form, salt in (
            ({"prompt_token_ids": prompt, "cache_salt": "a"}, None),
            ({"prompt_token_ids": prompt, "cache_salt": "a"}, "b"),
            ({"prompt_token_ids": prompt, "cache_salt": "c"}, "a"),
            (prompt, None),
        )
    )
    assert (first, other, without) == (0, 0, 0) and same > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "cannot have 'multi_modal_data'; a dict may have 'prompt'"),
        ({"prompt_embeds": torch.zeros(3, 8)}, "cannot have 'prompt_embeds'"),
        ({"text": "x"}, "cannot have 'text'"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": [1, 2]}, "'prompt' in a prompt must be a string, not list; token ids are 'prompt_token_ids'"),
        ({"prompt_token_ids": "words"}, "must be whole numbers, not 'w'"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt must be a string"),
        (torch.zeros(2, 3, dtype=torch.int64), r"one dimension, and this torch Tensor has 2, \[2, 3\]"),
        (np.zeros((2, 3), dtype=np.int64), r"one dimension, and this numpy ndarray has 2"),
        (torch.tensor([1.0, 2.0]), r"whole numbers, and this torch Tensor is of torch\.float32"),
        (np.array([1.0, 2.0]), "whole numbers, and this numpy ndarray is of float64"),
        (np.array([True, False]), "whole numbers, and this numpy ndarray is of bool"),
        (torch.tensor(5), "prompts must be text, token ids"),
        (list(torch.tensor([1.5, 2.5])), r"whole numbers, not 1\.5"),
        ([True, False], "whole numbers, not True"),
        (b"bytes", "not bytes"),
        (7, "not int"),
        (torch.zeros(0, dtype=torch.int64), "'prompt' is empty"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt, PARAMS)


# ---- what no request may be, whoever asks ---------------------------------------------------------------------------

PREPARER = RequestPreparer(tokenizer=None, vocab_size=10, max_model_len=4)


@pytest.mark.parametrize(
    ("token_ids", "lengths"), [([], (None, None)), ([1, 10], (None, None)), ([-1], (None, None)), ([1] * 4, (4, 3))]
)
def test_a_prompt_is_refused_under_the_name_of_its_field(
    token_ids: list[int], lengths: tuple[int | None, int | None]
) -> None:
    with pytest.raises(InvalidRequestError, match="'messages'") as caught:
        PREPARER.check_prompt(token_ids, param="messages")
    assert caught.value.param == "messages"
    found = (getattr(caught.value, "num_tokens", None), getattr(caught.value, "max_tokens", None))
    assert found == lengths, "how long it is and may be"
    with pytest.raises(type(caught.value)) as whole:
        PREPARER.prepare("a", token_ids, PARAMS)
    assert whole.value.param == "prompt"
    PREPARER.check_prompt([0, 9, 5])


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_is_refused_where_the_model_has_no_tokenizer(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} needs a tokenizer") as caught:
        PREPARER.check_params(SamplingParams(**{name: ["x"]}))  # type: ignore[arg-type]
    assert caught.value.param == name


def test_completions_are_sequences_of_their_own_when_they_are_asked_for() -> None:
    request = PREPARER.prepare("a", [1, 2], SamplingParams(n=2, seed=5))
    assert [child.request_id for child in request.children] == ["a#0", "a#1"]
    assert request.children is request.children
    other = dataclasses.replace(request, options=RequestOptions(priority=3))
    assert [child.options.priority for child in other.children] == [3, 3]
    assert (request.view.max_tokens, request.view.request_id) == (2, "a")


# ---- names of requests --------------------------------------------------------------------------------------------


def test_no_name_is_that_of_another_requests_part() -> None:
    names = ["a", "a#", "a##", "a#0", "a##0", "a#0#0", "#", "#0", "##0", "0", "a#1", "a#01", "a#0#"]
    ids = [core_id(name) for name in names] + [core_id(name, place) for name in names for place in (0, 1, 10)]
    assert len(set(ids)) == len(ids)
    assert core_id("plain") == "plain"


def test_names_with_a_hash_run_beside_the_parts_of_others() -> None:
    parts = SamplingParams(n=3, max_tokens=3)
    engine = create_engine({})
    names = ["a", "a#0", "a#1", "a#2", "a#0#1", "#", "a#"]
    for name in [*names[1:4], names[0], *names[4:]]:
        engine.add_request(name, IDS, parts if name in ("a", "a#0") else PARAMS, stream=False)
    assert {output.request_id: len(output.outputs) for output in all_outputs(engine)} == {
        name: 3 if name in ("a", "a#0") else 1 for name in names
    }
    engine.add_request("a", IDS, PARAMS)
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add_request("a", IDS, PARAMS)


def test_a_chosen_number_is_not_given_again(llm: LLM) -> None:
    streams = [llm.stream(IDS, PARAMS, request_id=name) for name in ("0", "1", "2")]
    assert llm.generate(IDS, PARAMS)[0].request_id not in ("0", "1", "2")
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


# ---- what failed, and what did not ------------------------------------------------------------------------------


def test_one_failing_request_does_not_discard_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with this prompt fail; it runs alone, so only it is ended."""
    llm = llm_of(create_engine({"max_num_seqs": 1}))
    names = iter(["first", "fail-me", "third", "fail-too", "fifth"])
    monkeypatch.setattr(llm, "_next_id", lambda: next(names))
    params = [SamplingParams(max_tokens=number) for number in (2, 3, 4, 5, 6)]
    with pytest.raises(RequestFailedError, match=r"'fail-me' failed: .*secret words \(and 1 more of 5\)") as caught:
        llm.generate([[number] for number in range(5)], params)
    outputs = caught.value.outputs
    assert [output.request_id for output in outputs] == ["first", "fail-me", "third", "fail-too", "fifth"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error", "length"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 0, 4, 0, 6]
    assert list(caught.value.errors) == ["fail-me", "fail-too"]


# ---- the model's vocabulary ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 96 tokens with a tokenizer of 600, and an end token that neither has."""
    folder = save_folder(hf_model("llama"), tmp_path_factory.mktemp("odd"))
    trained_backend(digits_apart=False).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 700]}')
    return folder


def test_ids_outside_the_vocabulary_are_refused_or_dropped(odd_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(odd_folder, device="cpu", dtype="float32", max_num_seqs=2, max_model_len=32)
    assert "700" in caplog.text and "model of 96 tokens" in caplog.text
    assert llm.get_tokenizer().eos_token_ids == (2,)
    word = next(
        word
        for token in range(VOCAB_SIZE, 600)
        if (word := llm.get_tokenizer().decode([token])).isalpha() and len(word) > 1
    )
    waits = SamplingParams(temperature=0, min_tokens=3, max_tokens=3)
    expected = llm.generate([[5, 6], [7, 8, 9]], waits, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in expected] == [3, 3]
    for bad, name in (
        ({"bad_words": [word]}, "bad_words"),
        ({"stop_token_ids": [700]}, "stop_token_ids"),
        ({"logit_bias": {96: 1.0}}, "logit_bias"),
        ({"logprobs": 97}, "logprobs"),
        ({"prompt_logprobs": 97}, "prompt_logprobs"),
    ):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            llm.generate([5, 6], SamplingParams(max_tokens=1, **bad))  # type: ignore[arg-type]
        assert caught.value.param == name
    for prompt in ([96], [-1], [2**40], word):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            llm.generate(prompt, waits)
    again = llm.generate([[5, 6], [7, 8, 9]], waits, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
