"""/v1/completions as clients see it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from headway.sampling_params import SamplingParams
from headway.wire.messages import Delta
from tests.unit.server.fake_engine import (
    COMPLETIONS,
    EMBEDDINGS,
    FakeEngine,
    FakeServer,
    engine_ready,
    events,
    infill_tokenizer,
    until,
)


def test_answer_has_openais_form_and_sixteen_tokens_by_default() -> None:
    server = FakeServer()
    answer = server.complete("The quick", add_special_tokens=False).json()
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello world.", "stop", None)
    (request,) = server.engine.requests
    assert request.params == SamplingParams(max_tokens=16)
    assert request.prompt_token_ids == server.tokenizer.encode("The quick", add_special_tokens=False)


def test_bad_words_are_spelt_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    encode, texts = server.tokenizer.encode, []

    def note(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return encode(text, **options)

    monkeypatch.setattr(server.tokenizer, "encode", note)
    assert server.complete([[1], [2], [3]], bad_words=["fox", "dog"]).status_code == 200
    assert texts == ["fox", " fox", "dog", " dog"]
    expected = tuple(tuple(encode(text, add_special_tokens=False)) for text in texts)
    params = [request.params for request in server.engine.requests]
    assert [each.bad_word_token_ids for each in params if each is not None] == [expected] * 3
    assert params[0] is params[1] is params[2], "they travel once"


def test_log_probabilities_of_very_many_prompt_tokens_are_refused() -> None:
    server = FakeServer(max_body_bytes=2**23)
    prompts = [[1] * 200] * 64
    assert server.complete(prompts, prompt_logprobs=19).status_code == 200
    refused = server.complete(prompts, prompt_logprobs=20)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "268800" in refused.json()["error"]["message"]


def test_several_prompts_and_choices_are_numbered_in_order() -> None:
    server = FakeServer()
    answer = server.complete(["one", "two", "three"], n=2, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [f"{word}Hello world." for word in ("one", "one", "two", "two", "three", "three")]
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
    chunks = events(server.complete(["one", "two", "three"], n=2, echo=True, stream=True))
    streamed = [""] * 6
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 6
    for prompt, token_ids in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])):
        assert server.complete(prompt).json()["usage"]["prompt_tokens"] == 3
        assert [request.prompt_token_ids for request in server.engine.requests[-len(token_ids) :]] == token_ids


def test_logprobs() -> None:
    server = FakeServer()
    logprobs = server.complete(logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    token_texts = [server.tokenizer.token_text(300 + place) for place in range(2)]
    assert logprobs["tokens"] == token_texts
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, len(token_texts[0])]
    assert logprobs["top_logprobs"][0] == {server.tokenizer.token_text(301): -0.25, token_texts[0]: -0.5}
    chunks = events(server.complete(logprobs=1, max_tokens=2, stream=True))
    assert [chunk["choices"][0]["logprobs"]["tokens"][0] for chunk in chunks] == token_texts
    assert [chunk["choices"][0]["logprobs"]["text_offset"][0] for chunk in chunks] == logprobs["text_offset"]


def test_echo_covers_the_prompt_also_its_logprobs() -> None:
    server = FakeServer()
    token_ids = server.tokenizer.encode("The quick brown fox")
    assert server.complete(token_ids, echo=True).json()["choices"][0]["text"] == "The quick brown foxHello world."
    choice = server.complete([5, 6, 7], echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["prompt_logprobs"] is None
    answer = FakeServer().complete([5, 6, 7], echo=True, logprobs=0, max_tokens=0).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3, "only the prompt"
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)


def test_more_prompts_than_can_wait_are_not_even_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **options: pytest.fail("was tokenised"))
    refused = server.complete(["a"] * 1025)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


async def test_several_prompts_of_a_stream_come_as_they_are_made() -> None:
    server = FakeServer(FakeEngine(manual=True))
    client = server.begin(COMPLETIONS, prompt=["a", "b"], stream=True)
    await server.engine.asked(2)
    first, second = (request.request_id for request in server.engine.requests)
    server.engine.push(Delta(second, text="B", token_ids=[1]))
    await until(lambda: b'"index":1,"text":"B"' in client.body)
    server.engine.push(Delta(first, text="A", token_ids=[1], finish_reason="stop", is_last=True))
    await until(lambda: b'"index":0,"text":"A"' in client.body)
    server.engine.push(Delta(second, text="C", token_ids=[1], finish_reason="stop", is_last=True))
    await until(lambda: client.body.endswith(b"data: [DONE]\n\n"))


def test_token_ids_are_told_whole_and_streamed_and_as_logprobs() -> None:
    server = FakeServer()
    fields: dict[str, Any] = {"return_token_ids": True, "echo": True, "max_tokens": 2}
    choices = server.complete([[5, 6], [7]], **fields).json()["choices"]
    told = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices]
    assert told == [([5, 6], [300, 301]), ([7], [300, 301])]
    chunks = [chunk["choices"][0] for chunk in events(server.complete([[5, 6], [7]], **fields, stream=True))]
    assert [(chunk["prompt_token_ids"], chunk["token_ids"]) for chunk in chunks[:2]] == [([5, 6], []), ([7], [])]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[2:])
    for index, choice in enumerate(choices):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in own for token in chunk["token_ids"]] == [300, 301]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
    fields = {"logprob_token_ids": [5], "return_tokens_as_token_ids": True, "max_tokens": 2}
    logprobs = server.complete(**fields).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:300", "token_id:301"]
    assert logprobs["top_logprobs"][0] == {"token_id:5": -5.0, "token_id:300": -0.5}
    assert logprobs["text_offset"] == [0, len(server.tokenizer.token_text(300))]


def test_prompts_are_cut_to_their_last_tokens() -> None:
    server = FakeServer()
    choices = server.complete([[1, 2, 3], [4]], truncate_prompt_tokens=2, return_token_ids=True).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[2, 3], [4]]
    text = "The quick brown fox"
    kept = server.tokenizer.encode(text)[-2:]
    answer = server.complete(text, truncate_prompt_tokens=2, echo=True, max_tokens=1).json()
    assert server.engine.requests[-1].prompt_token_ids == kept
    assert answer["choices"][0]["text"] == server.tokenizer.decode(kept) + "Hello"
    assert server.complete([1] * 9999, truncate_prompt_tokens=-1).status_code == 200
    assert len(server.engine.requests[-1].prompt_token_ids) == 240


def test_the_middle_is_filled_in() -> None:
    server = FakeServer(tokenizer=infill_tokenizer())
    server.engine.info = engine_ready(vocab_size=server.tokenizer.backend.get_vocab_size())
    assert server.complete(["def f", "x"], suffix="return 1").status_code == 200
    encode = server.tokenizer.encode
    first, middle, last = (server.tokenizer.backend.token_to_id(f"<fim_{n}>") for n in ("prefix", "suffix", "middle"))
    expected = [[first, *encode(text), middle, *encode("return 1"), last] for text in ("def f", "x")]
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert server.complete("Hi", suffix="").status_code == 200
    assert server.engine.requests[-1].prompt_token_ids == encode("Hi")
    without = FakeServer().complete("Hi", suffix="x")
    assert (without.status_code, without.json()["error"]["param"]) == (400, "suffix"), "it knows no middle"


def embed(server: FakeServer, given: Any, **fields: Any) -> Any:
    return server.send(EMBEDDINGS, input=given, **fields)


def test_vectors_have_openais_form_and_length_one() -> None:
    server = FakeServer()
    vector = [pytest.approx(0.6), 0.0, pytest.approx(0.8), 0.0]
    assert embed(server, [[1, 2], [3]], model="small").json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index in range(2)],
        "model": "small",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert [request.params for request in server.engine.requests] == [SamplingParams.for_embedding()] * 2
    assert embed(server, [1], model="other").json()["error"]["param"] == "model"


def test_vectors_as_they_are_wanted() -> None:
    server = FakeServer()
    assert embed(server, [1, 2], normalize=False).json()["data"][0]["embedding"] == [6.0, 0.0, 8.0, 0.0]
    assert embed(server, [1, 2], dimensions=1).json()["data"][0]["embedding"] == [1.0]
    packed = embed(server, "Hi", encoding_format="base64", normalize=False).json()["data"][0]["embedding"]
    number = len(server.engine.requests[-1].prompt_token_ids)
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == [3 * number, 0, 4 * number, 0]
    embed(server, "Hi", pooling="last")
    params = server.engine.requests[-1].params
    assert params is not None and params.pooling == "last"
