"""The offline API on the default model: what users type first, and what they mistype."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError, EngineDead, HeadError, LoadError, ParamsError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Write a haiku."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_streams=4) as llm:
        yield llm


def ask(llm: LLM, question: str) -> list[int]:
    return llm.chat_tokens([{"role": "user", "content": question}])


def nothing_leaks(llm: LLM) -> None:
    """A plain request still runs, and afterwards every block is free again."""
    llm.generate([[1, 2, 3]], replace(GREEDY, max_tokens=1))
    while llm.snapshot().num_running:
        pass
    assert llm.snapshot().num_used_blocks == 0
    assert llm.snapshot().num_free_blocks == llm.engine.info.num_blocks


def test_it_answers(llm: LLM) -> None:
    [output] = llm.generate([ask(llm, QUESTIONS[0])], GREEDY)
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert output.stats.output_tokens == len(output.token_ids)


def test_the_same_beginning_is_computed_once_unless_told_otherwise(llm: LLM) -> None:
    prompt = llm.tokens_of("The same long beginning of a prompt. " * 20)
    assert len(prompt) > 64
    params = replace(GREEDY, max_tokens=4)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.stats.cached_tokens == 0
    assert len(prompt) - 2 * llm.engine.info.block_size < second.stats.cached_tokens < len(prompt)
    with LLM(max_streams=4, prefix_cache=False) as without:
        outputs = [without.generate([prompt], params)[0] for _ in range(2)]
    assert [output.stats.cached_tokens for output in outputs] == [0, 0]
    assert {output.token_ids for output in (first, second, *outputs)} == {first.token_ids}


def test_several_answers_are_those_of_the_seeds_behind_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, draft=2)
    prompts = [ask(llm, question) for question in QUESTIONS[:2]]
    together = llm.generate(prompts, params, n=3)
    apart = [llm.generate([prompt], replace(params, seed=3 + i))[0] for prompt in prompts for i in range(3)]
    assert [o.token_ids for o in together] == [o.token_ids for o in apart]
    assert len({o.token_ids for o in together}) > 4
    with pytest.raises(RequestError, match="at most 4 streams"):
        llm.generate(prompts, params, n=5)
    nothing_leaks(llm)


def test_log_probabilities_are_the_same_with_and_without_drafts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=16, seed=3, logprobs=4, prompt_logprobs=2, presence_penalty=0.5)
    prompts = [ask(llm, question) for question in QUESTIONS]
    alone = [llm.generate([prompt], replace(params, draft="off"))[0] for prompt in prompts]
    together = llm.generate(prompts, replace(params, draft=3))
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        assert one.prompt_logprobs == other.prompt_logprobs
        assert (len(one.logprobs), len(one.prompt_logprobs)) == (len(one.token_ids), len(one.prompt_token_ids) - 1)
        for entry in one.logprobs:
            ranked = sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))
            assert list(entry.top) == ranked
            assert len(ranked) == 4
            assert entry.logprob <= ranked[0][1] <= 0.0
    pieces = list(llm.stream(prompts[0], replace(params, draft=3)))
    assert tuple(one for piece in pieces for one in piece.logprobs) == alone[0].logprobs
    assert pieces[0].prompt_logprobs == alone[0].prompt_logprobs


@pytest.mark.each_value
@pytest.mark.parametrize("draft", ["off", "solo", "adaptive", 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_seed_same_text_whatever_the_policy_and_company(llm: LLM, draft: str | int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=24, seed=7, repetition_penalty=1.05)
    prompts = [ask(llm, question) for question in QUESTIONS]
    alone = [llm.generate([prompt], replace(params, draft="off"))[0] for prompt in prompts]
    together = llm.generate(prompts, replace(params, draft=draft))  # type: ignore[arg-type]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert all(o.stats.draft_tokens == 0 for o in alone)
    if draft in (1, 4):
        assert all(o.stats.draft_tokens > 0 for o in together)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, draft=d) for n, d in ((3, "off"), (7, 3), (5, 1))]
    outputs = llm.generate([ask(llm, "Tell me a story.")] * 3, params)
    assert [len(o.token_ids) for o in outputs] == [3, 7, 5]
    assert [o.stats.draft_tokens > 0 for o in outputs] == [False, True, True]
    assert outputs[1].token_ids[:3] == outputs[0].token_ids


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    prompt = ask(llm, "Write a sentence with an emoji: 🌍 and 你好.")
    [whole] = llm.generate([prompt], GREEDY)
    events = list(llm.stream(prompt, GREEDY))
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token for event in events for token in event.tokens) == whole.token_ids
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    for _ in llm.stream(ask(llm, "Count to one thousand."), SamplingParams(max_tokens=2000, ignore_eos=True)):
        break
    nothing_leaks(llm)


def test_a_prompt_over_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"9000 tokens.*8192"):
        llm.generate([[5] * 9000], GREEDY)
    nothing_leaks(llm)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ([], "empty"),
        ([49152], "vocabulary"),
        ([-1], "vocabulary"),
        (["word"], "token ids"),
        ("bad \ud800 text", "surrogate"),
    ],
)
def test_prompts_that_can_never_run(llm: LLM, prompt: str | list[int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.generate([[1, 2], prompt], GREEDY)
    nothing_leaks(llm)


def test_one_string_is_not_a_list_of_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="list"):
        llm.generate("What?", GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"top_k": -1},
        {"max_tokens": 0},
        {"seed": 2**64},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"stop_token_ids": (-3,)},
        {"draft": "always"},
        {"draft": 99},
        {"p_min": 1.5},
    ],
)
def test_parameters_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ParamsError):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_logit_bias_outside_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        llm.generate([[1]], SamplingParams(logit_bias={60000: 1.0}))


def test_wrong_number_of_params(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="2 prompts"):
        llm.generate([[1], [2]], [GREEDY])


def test_a_closed_engine_says_so() -> None:
    llm = LLM(max_streams=1, draft="off", max_context=128)
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate([[1]], GREEDY)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "/no/such/model.gguf"}, LoadError),
        ({"mtp": "/no/such/head.safetensors"}, LoadError),
        ({"dtype": "int3"}, ConfigError),
        ({"device": "tpu"}, ConfigError),
        ({"runner": "jax"}, ConfigError),
        ({"max_streams": 0}, ConfigError),
        ({"draft": "sometimes"}, ConfigError),
        ({"kv_memory": 1000}, ConfigError),
        ({"kv_dtype": "int3"}, ConfigError),
        ({"state_dtype": "int3"}, ConfigError),
        ({"state_dtype": "float16", "device": "cpu"}, ConfigError),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        LLM(**options)  # type: ignore[arg-type]


def test_a_head_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    save_file(tiny.head_tensors(tiny.build("llama-gqa-tied")), head)
    with pytest.raises(HeadError, match=r"The MTP head that was given cannot be used: .* mtp\.fc\.weight is"):
        LLM(mtp=str(head), max_streams=1)


def test_quick_exit_without_close() -> None:
    """A script that forgets to close must end, not hang on the engine thread."""
    script = "from slipstream import LLM; LLM(max_streams=1, draft='off', max_context=64)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
