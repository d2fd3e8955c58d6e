"""json_schema requests at temperature 1, sixteen streams at a time, among plain ones: every answer is valid.

Twenty requests, one a schema; 180 more in the exhaustive case. With ``-s`` it prints how many drafts were accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema
import pytest
from schemas import SCHEMAS

from slipstream import LLM, Output, SamplingParams
from slipstream.grammar import JsonSchema

PLAIN = ["Write a haiku.", "Why is the sky blue?", "Name three colours.", "Count to ten."]


def accepted(outputs: Sequence[Output]) -> float:
    return sum(o.stats.accepted_tokens for o in outputs) / max(1, sum(o.stats.draft_tokens for o in outputs))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 10), marks=pytest.mark.exhaustive)], ids=len)
def test_every_answer_is_valid(seeds: range) -> None:
    with LLM(max_streams=16, draft=2) as llm:  # whether to draft would differ by machine
        prompts, params, names = [], [], []
        for seed in seeds:
            for i, (name, schema) in enumerate(SCHEMAS.items()):
                question = f"Give me an example of: {name}. Answer in JSON."
                prompts.append(llm.chat_tokens([{"role": "user", "content": question}]))
                constraint = llm.constraint(JsonSchema(schema))
                params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=600, constraint=constraint))
                names.append(name)
                if i % 4 == 0:
                    prompts.append(llm.chat_tokens([{"role": "user", "content": PLAIN[i // 4 % 4]}]))
                    params.append(SamplingParams(temperature=1.0, seed=seed, max_tokens=80))
                    names.append("")
        outputs = llm.generate(prompts, params)
    structured = [(name, output) for name, output in zip(names, outputs, strict=True) if name]
    for name, output in structured:
        assert output.finish_reason == "stop", (name, output.finish_reason, output.text[-200:])
        jsonschema.validate(
            json.loads(output.text), SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    assert len(structured) == len(SCHEMAS) * len(seeds)
    plain = [output for name, output in zip(names, outputs, strict=True) if not name]
    constrained = [output for _, output in structured]
    rates = f"{accepted(constrained):.3f} constrained, {accepted(plain):.3f} plain"
    print(f"\n{len(structured)} answers valid; drafts accepted: {rates}")
    assert sum(output.stats.accepted_tokens for output in constrained) > 0
