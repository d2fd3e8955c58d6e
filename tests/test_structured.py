"""Structured output through the offline API, on the default model: valid, the same whatever the policy and company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import GrammarError
from slipstream.grammar import Choice, JsonObject, JsonSchema, Lark, Regex
from slipstream.sampling import AfterThinking, AllOf, ThinkingBudget

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_streams=4) as llm:
        yield llm


def ask(llm: LLM, question: str) -> list[int]:
    return llm.chat_tokens([{"role": "user", "content": question}])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_seed_same_answers_whatever_the_policy_and_company(llm: LLM, temperature: float) -> None:
    specs = [JsonSchema(PERSON), Choice(["red", "green", "blue"]), Regex("[A-Z][a-z]{2,9}, [0-9]{4}"), JsonObject()]
    prompts = [ask(llm, "Invent a person, as JSON: name and age.") for _ in specs]
    params = [
        SamplingParams(temperature=temperature, max_tokens=48, seed=i, constraint=llm.constraint(spec))
        for i, spec in enumerate(specs)
    ]
    together = llm.generate(prompts, [replace(own, draft=3) for own in params])
    for prompt, own, output in zip(prompts, params, together, strict=True):
        [alone] = llm.generate([prompt], replace(own, draft="off"))
        assert alone.token_ids == output.token_ids
        assert output.stats.draft_tokens > 0
    jsonschema.validate(json.loads(together[0].text), PERSON)
    assert together[1].text in ("red", "green", "blue")


def test_thinking_with_a_budget_then_a_grammar(llm: LLM) -> None:
    marker = tuple(llm.tokenizer.encode("</think>"))
    constraint = AllOf((ThinkingBudget(6, marker), AfterThinking(llm.constraint(Choice(["yes", "no"])), marker)))
    [output] = llm.generate([ask(llm, "Is water wet?")], SamplingParams(constraint=constraint, max_tokens=40))
    thoughts, _, answer = output.text.partition("</think>")
    assert answer in ("yes", "no")
    assert len(llm.tokenizer.encode(thoughts)) <= 6


def test_bad_words_and_min_tokens(llm: LLM) -> None:
    prompt, greedy = ask(llm, "What is the capital of France?"), SamplingParams(temperature=0.0, max_tokens=24)
    bad = tuple(tuple(llm.tokenizer.encode(text)) for text in ("Paris", " Paris"))
    [output] = llm.generate([prompt], replace(greedy, bad_words=bad))
    assert "Paris" not in output.text
    [short] = llm.generate([prompt], greedy)
    [longer] = llm.generate([prompt], replace(greedy, min_tokens=len(short.token_ids) + 4))
    assert len(longer.token_ids) >= len(short.token_ids) + 4
    assert longer.text.startswith(short.text)


def test_a_fault_ends_one_answer_with_its_text(llm: LLM) -> None:
    """A grammar that leads where bad words are the only way on."""
    names = (llm.tokenizer.token_bytes(token) for token in range(llm.tokenizer.vocab_size))
    digits = tuple((token,) for token, name in enumerate(names) if any(48 <= byte < 58 for byte in name))
    constraint = llm.constraint(Lark('start: "aaaa" /[0-9]/'))
    dead_end = SamplingParams(constraint=constraint, bad_words=digits, max_tokens=24)
    [broken, whole] = llm.generate(
        [ask(llm, "Hi"), ask(llm, "What is the capital of France?")],
        [dead_end, SamplingParams(temperature=0.0, max_tokens=24)],
    )
    assert (broken.finish_reason, broken.text) == ("error", "aaaa")
    assert "no token" in broken.error
    assert whole.text == "The capital of France is Paris."
    *_, last = llm.stream(ask(llm, "Hi"), dead_end)
    assert last.finish_reason == "error"


def test_a_bad_schema_is_said_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(GrammarError, match=r"schema\.properties\.x: "):
        llm.constraint(JsonSchema({"properties": {"x": {"type": "wat"}}}))
