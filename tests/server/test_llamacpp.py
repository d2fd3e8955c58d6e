"""llama.cpp's own paths: /completion, /props, /slots, /apply-template, /tokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_server import END, TOKENIZER, WAIT, FakeServer, asked, events, raw_post, said, until
from test_engine import GatedRunner

from slipstream.config import EngineConfig
from slipstream.grammar import Gbnf, JsonSchema
from slipstream.sampling import SamplingParams
from slipstream.server.protocols.llamacpp.completion import (
    LlamaCompletionRequest,
    llama_completion_generation_request,
)
from slipstream.server.service.generation_request import GenerationRequest
from slipstream.server.service.prompts import MixedPrompt, TextPrompt
from slipstream.server.service.settings import ServerConfig
from slipstream.server.text.response_format import ResponseFormat

PATH = "/completion"
WHOLE = {
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}


def answer(server: FakeServer, **body: Any) -> Any:
    response = server.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: FakeServer, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + PATH, json={**body, "stream": True}, timeout=WAIT) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert "data: [DONE]" not in lines
    return events(iter(lines))


def request(**fields: Any) -> GenerationRequest:
    given = LlamaCompletionRequest.model_validate({"prompt": "a", **fields})
    return llama_completion_generation_request(given, EngineConfig())


def test_a_whole_answer(fake: FakeServer) -> None:
    found = answer(fake, prompt="hi", seed=3, n_predict=20)
    assert set(found) == WHOLE
    assert found["content"] == said("hi", 3, 20)
    assert (found["stop"], found["stop_type"], found["stopping_word"], found["truncated"]) == (True, "limit", "", False)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (20, 2)
    assert (found["prompt"], found["tokens"], found["model"]) == ("hi", [], "fake")
    assert found["generation_settings"]["n_predict"] == 20
    assert found["generation_settings"]["seed"] == 3
    assert found["timings"]["predicted_n"] == 20
    assert {"cache_n", "prompt_per_token_ms", "predicted_per_token_ms"} <= set(found["timings"])


def test_a_stream_has_no_end_mark(fake: FakeServer) -> None:
    *deltas, last = stream(fake, prompt="hi", seed=3, n_predict=20, timings_per_token=True)
    assert "".join(each["content"] for each in deltas) == said("hi", 3, 20)
    assert [token for each in deltas for token in each["tokens"]] == TOKENIZER.encode(said("hi", 3, 20))
    assert not any(each["stop"] for each in deltas)
    assert deltas[-1]["tokens_predicted"] == deltas[-1]["timings"]["predicted_n"] == 20
    assert set(last) == WHOLE
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)


def test_how_it_ended(fake: FakeServer) -> None:
    seed = next(seed for seed in range(100) if 8 < len(said("hi", seed, 100)) < 60)  # the model ends by itself
    text = said("hi", seed, 100)
    stop = text[4:6]
    by_word = answer(fake, prompt="hi", seed=seed, stop=[stop])
    assert (by_word["stop_type"], by_word["stopping_word"]) == ("word", stop)
    assert by_word["content"] == text[: text.index(stop)]
    by_end = answer(fake, prompt="hi", seed=seed, n_predict=-1, return_tokens=True)
    assert (by_end["content"], by_end["stop_type"], by_end["truncated"]) == (text, "eos", False)
    assert by_end["tokens"] == [*TOKENIZER.encode(text), END]
    by_context = answer(fake, prompt="hi", seed=seed, ignore_eos=True)
    assert (by_context["stop_type"], by_context["truncated"]) == ("limit", True)


def test_prompts_of_text_and_tokens(fake: FakeServer) -> None:
    tokens = TOKENIZER.encode("hi there")
    same = {"seed": 3, "n_predict": 8}
    expected = said("hi there", 3, 8)
    mixed: list[Any] = [[*tokens[:2], " there"], ["hi ", *tokens[3:]]]
    for prompt in ("hi there", tokens, ["hi there"], *mixed, [tokens], [["hi", " there"]]):
        assert answer(fake, prompt=prompt, **same)["content"] == expected
    several = answer(fake, prompt=["hi there", TOKENIZER.encode("ho")], **same)
    assert [each["content"] for each in several] == [expected, said("ho", 3, 8)]
    assert [(each["index"], each["tokens_evaluated"]) for each in several] == [(0, 8), (1, 2)]
    assert request(prompt=[1, "a"]).prompt == MixedPrompt([1, "a"])
    assert request(prompt="a").prompt == TextPrompt("a")


@pytest.mark.parametrize("prompt", [[], [[]], [1, [2]], 3, None, [-1], [True], {"text": "a"}])
def test_prompts_that_are_none(fake: FakeServer, prompt: Any) -> None:
    response = fake.post(PATH, prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_sampling_parameters() -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 4, "n_predict": 9}
    found = request(**given, repeat_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.25).params
    assert found == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        max_tokens=9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert request(seed=-1, top_k=-1, n_predict=-1).params == SamplingParams(max_tokens=None)
    assert request(n_predict=0).params.max_tokens == 1
    assert request(max_tokens=5).params.max_tokens == 5


def test_samplers_that_are_not_listed_are_off() -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "n_predict": 9}
    only_top_k = SamplingParams(top_k=7, max_tokens=9)
    assert request(**given, samplers=["top_k"]).params == only_top_k
    assert request(**given, samplers="k").params == only_top_k
    every = ["penalties", "dry", "top-k", "typ_p", "nucleus", "min_p", "xtc", "temp"]
    assert request(**given, samplers=every) == request(**given)
    assert request(**given, samplers="edskypmxt") == request(**given)


def test_a_sampler_that_is_unknown_is_ignored_and_named(fake: FakeServer) -> None:
    known = ["penalties", "dry", "top-k", "typ_p", "typical-p", "nucleus", "min_p", "xtc", "temp", "top_n_sigma"]
    for samplers in (known, "edskypmxtia", []):
        assert "warnings" not in answer(fake, prompt="a", n_predict=1, samplers=samplers)
    warnings = answer(fake, prompt="a", n_predict=1, samplers=["bogus", "top_k", "bogus", "x"])["warnings"]
    assert warnings == [
        "samplers: 'bogus' is not a sampler this server knows: it was ignored",
        "samplers: 'x' is not a sampler this server knows: it was ignored",
    ]
    [warning] = stream(fake, prompt="a", n_predict=1, samplers="kb")[-1]["warnings"]
    assert warning.startswith("samplers: 'b' ")


def test_strict_refuses_an_unknown_sampler() -> None:
    with FakeServer(config=ServerConfig(port=0, strict=True)) as server:
        error = server.post(PATH, prompt="a", samplers=["top_k", "bogus"]).json()["error"]
        assert error["message"] == "samplers: 'bogus' is not a sampler this server knows"
        assert (error["code"], error["param"]) == ("unknown_field", "samplers")
        assert server.post(PATH, prompt="a", n_predict=1, samplers=["top_k", "dry"]).status_code == 200


def test_biases() -> None:
    expected = {5: 1.5, 6: -100.0}
    assert request(logit_bias=[[5, 1.5], [6, False]]).params.logit_bias == expected
    assert request(logit_bias={"5": 1.5, "6": False}).params.logit_bias == expected


def test_biases_of_texts_are_refused(fake: FakeServer) -> None:
    for bias in ([["Hello", 1.0]], [[5]], [5, 1.0], [[5, True]], "5"):
        response = fake.post(PATH, prompt="a", logit_bias=bias)
        assert response.status_code == 400
        assert "logit_bias" in response.json()["error"]["message"]


def test_grammars() -> None:
    gbnf = 'root ::= "yes" | "no"'
    assert request(grammar=gbnf).response_format == ResponseFormat(Gbnf(gbnf), "grammar")
    schema = {"type": "object"}
    assert request(json_schema=schema).response_format == ResponseFormat(JsonSchema(schema), "json_schema")
    assert request(grammar="").response_format is None


@pytest.mark.parametrize(
    "field",
    [{"mirostat": 2}, {"typical_p": 0.5}, {"dry_multiplier": 0.8}, {"xtc_probability": 0.5}, {"lora": [{"id": 0}]}],
)
def test_what_would_change_the_text_is_refused_by_name(fake: FakeServer, field: dict[str, Any]) -> None:
    response = fake.post(PATH, prompt="a", **field)
    assert response.status_code == 400
    assert next(iter(field)) in response.json()["error"]["message"]


def test_settings_without_effect_pass(fake: FakeServer) -> None:
    neutral = {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "xtc_probability": 0, "dynatemp_range": 0}
    without_effect = {"cache_prompt": True, "id_slot": -1, "n_keep": 0, "repeat_last_n": 64, "mirostat_tau": 5.0}
    assert "warnings" not in answer(fake, prompt="a", n_predict=1, **neutral, **without_effect)
    assert "colour" in answer(fake, prompt="a", n_predict=1, colour=1)["warnings"][0]


def test_probabilities(fake: FakeServer) -> None:
    asked_for = {"prompt": "hi", "seed": 3, "n_predict": 3, "n_probs": 2}
    found = answer(fake, **asked_for, return_tokens=True)
    entries = found["completion_probabilities"]
    assert [each["id"] for each in entries] == found["tokens"]
    assert all(set(each) == {"id", "token", "bytes", "logprob", "top_logprobs"} for each in entries)
    top = [each["top_logprobs"] for each in entries]
    assert [[set(each) for each in two] for two in top] == [[{"id", "token", "bytes", "logprob"}] * 2] * 3
    assert all(TOKENIZER.decode([each["id"]]) == each["token"] for two in top for each in two)
    *deltas, last = stream(fake, **asked_for)
    assert [entry for each in deltas for entry in each["completion_probabilities"]] == entries
    assert "completion_probabilities" not in last


def test_chosen_fields(fake: FakeServer) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing", "content/deeper"]
    found = answer(fake, prompt="hi", seed=3, n_predict=2, response_fields=fields)
    assert found == {"content": said("hi", 3, 2), "generation_settings/n_predict": 2}


def test_errors_have_the_usual_shape(fake: FakeServer) -> None:
    response = fake.post(PATH, n_predict=3)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt is required"


def test_apply_template(fake: FakeServer) -> None:
    assert fake.post("/apply-template", messages=[{"role": "user", "content": "hi"}]).json() == {"prompt": asked("hi")}
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert fake.post("/apply-template", messages=begun).json() == {"prompt": asked("hi") + "So"}
    assert fake.post("/apply-template", messages=[]).status_code == 400


def test_props(fake: FakeServer) -> None:
    found = fake.get("/props").json()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] > 0
    assert {"temperature", "top_k", "top_p", "min_p", "n_predict", "samplers", "mirostat"} <= set(settings["params"])
    assert found["total_slots"] == fake.engine_config.max_streams
    assert found["model_alias"] == found["model_path"] == "fake"
    assert found["chat_template"] == TOKENIZER.template_text
    assert not any(found["modalities"].values())
    assert found["eos_token"] == "<|end|>"
    assert found["build_info"].startswith("slipstream-")


def test_slots() -> None:
    runner = GatedRunner(num_blocks=256)
    with FakeServer(runner) as server:
        idle = server.get("/slots").json()
        assert [slot["id"] for slot in idle] == list(range(server.engine_config.max_streams))
        assert not any(slot["is_processing"] for slot in idle)
        assert all(slot["n_ctx"] > 0 for slot in idle)
        assert server.get("/slots?fail_on_no_slot=1").status_code == 200
        clients = [raw_post(server.port, PATH, {"prompt": "hi", "n_predict": 99, "ignore_eos": True}) for _ in idle]

        def all_busy_after_a_step() -> bool:
            runner.fuel.put(1)
            return all(slot["is_processing"] for slot in server.get("/slots").json())

        until(all_busy_after_a_step)
        assert {slot["n_prompt_tokens"] for slot in server.get("/slots").json()} == {2}
        full = server.get("/slots?fail_on_no_slot=1")
        assert (full.status_code, full.json()["error"]["code"]) == (503, "no_slot")
        for client in clients:
            client.close()


def test_tokenize_as_llama_cpp_spells_it(fake: FakeServer) -> None:
    def tokens(**body: Any) -> Any:
        return fake.post("/tokenize", **body).json()["tokens"]

    assert tokens(content="a<|end|>") == [*TOKENIZER.encode("a"), END]
    assert tokens(content="a<|end|>", parse_special=False) == TOKENIZER.encode("a<|end|>", allow_special=False)
    assert tokens(content=["a", END, "b"], add_special=True) == [*TOKENIZER.encode("a"), END, *TOKENIZER.encode("b")]
    [first, last] = tokens(content="a<|end|>", with_pieces=True)
    assert (first["piece"], last) == ("a", {"id": END, "piece": "<|end|>"})
    assert fake.post("/detokenize", tokens=[first["id"], END]).json()["content"] == "a<|end|>"


def test_ids_outside_the_vocabulary_are_refused_everywhere(fake: FakeServer) -> None:
    outside = "has token ids outside the vocabulary of 97"
    for path, field, value, name in (
        ("/v1/completions", "prompt", [1, 999999], "the prompt"),
        (PATH, "prompt", ["a", 999999], "the prompt"),
        ("/detokenize", "tokens", [1, 999999], "tokens"),
        ("/detokenize", "tokens", [97], "tokens"),
        ("/tokenize", "content", ["a", 97], "content"),
    ):
        response = fake.post(path, **{field: value})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"{name} {outside}"
    assert fake.post("/detokenize", tokens=[]).json()["content"] == ""


@pytest.mark.parametrize("path", ["/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/v1/rerank", "/infill"])
def test_what_is_not_served_says_what_to_do(fake: FakeServer, path: str) -> None:
    for response in (fake.post(path, input="a"), fake.get(path)):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_served"
        assert response.json()["error"]["message"].startswith("this server")


def test_there_are_no_adapters(fake: FakeServer) -> None:
    assert fake.get("/lora-adapters").json() == []
