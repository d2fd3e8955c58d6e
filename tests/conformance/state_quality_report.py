"""What recurrent states in 16 bits cost: mean KL of the next token against float32 states, by position in the text.

`python tests/conformance/state_quality_report.py --model FOLDER` measures a Qwen3.5-like model. Without one a small
model of bytes is trained first on this repository's files, for `--minutes`; texts are files that it has not seen.
States are rounded after every token, as the Triton kernels do while decoding; everything else is float32 on the CPU. To
compare: float32 states, everything else in bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import open_runner, target_logits
from rounded_states import as_stored, rounding_steps
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from slipstream.load import open_model
from slipstream.runners.torch import gdn

ROOT = Path(__file__).parents[2]
RUNS = {
    "states in float16": (torch.float16,),
    "states in bfloat16": (torch.bfloat16,),
    "all but the states in bfloat16": (torch.float32, "bfloat16"),
}
FEED = 16  # tokens that the reference takes one by one; texts are multiples
SHORT, LONG = 400, 4000  # tokens of a text
ENDS = (400, 1000, 2000, 4000)
SIZES = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,  # three of them recurrent
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LENGTHS = ((0.6, 512, 4), (1.0, 2048, 1))  # until which share of the time: tokens of a row, rows


def texts() -> tuple[list[str], list[str]]:
    """To train on, and to measure with."""
    found = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("slipstream/**/*.py")])
    read = [path.read_text() for path in found]
    held = [i for i in range(len(read)) if i % 12 == 5]
    return [text for i, text in enumerate(read) if i not in held], [read[i] for i in held]


def slow_decays(model: Qwen3_5ForCausalLM) -> None:
    """Heads that keep 10 to 1000 tokens. `transformers` itself begins with states that forget at once."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.zero_()
            if name.endswith("dt_bias"):
                rates = 10.0 ** -torch.linspace(1, 3, weight.numel())
                weight.copy_(torch.log(torch.expm1(rates)))


def decays(model: Qwen3_5ForCausalLM) -> list[float]:
    """Of each recurrent head, where a token's own gate is 0."""
    found = dict(model.named_parameters())
    names = [name.removesuffix("A_log") for name in found if name.endswith("A_log")]
    rates = [found[f"{name}A_log"].exp() * softplus(found[f"{name}dt_bias"]) for name in names]
    return sorted(torch.exp(-torch.cat(rates)).tolist())


def train(seconds: float, folder: Path) -> None:
    torch.manual_seed(0)
    data = torch.tensor(list("\n\n".join(texts()[0]).encode()))
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).float()
    slow_decays(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, betas=(0.9, 0.98))
    began, step, losses = time.monotonic(), 0, []
    while (share := (time.monotonic() - began) / seconds) < 1:
        length, rows = next((length, rows) for until, length, rows in LENGTHS if share < until)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * max(0.05, 1 - share)
        batch = torch.stack([data[at : at + length + 1] for at in torch.randint(0, len(data) - length - 1, (rows,))])
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses = [*losses[-49:], loss.item()]
    print(f"trained in {step} steps to {sum(losses) / len(losses):.2f} nats a byte")
    print("decays of its heads:", " ".join(f"{each:.4f}" for each in decays(model)), flush=True)
    model.save_pretrained(folder)


def logits(folder: Path, tokens: Sequence[int], states: torch.dtype, dtype: str = "float32") -> Tensor:
    steps = gdn._steps
    if states != torch.float32:
        gdn._steps = rounding_steps(lambda state: as_stored(state, states))
    try:
        feeds = [FEED] * (len(tokens) // FEED)
        runner = open_runner(folder, streams=2, dtype=dtype)
        return target_logits(runner, list(tokens), feeds).float()
    finally:
        gdn._steps = steps


def compared(exact: Tensor, found: Tensor) -> Tensor:
    """KL and whether the likeliest token is the same, by position. [2, tokens]"""
    p, q = (each.double().log_softmax(-1) for each in (exact, found))
    return torch.stack([(p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).double()])


def measure(folder: Path, parts: list[list[int]], ends: Sequence[int]) -> None:
    exact = [logits(folder, tokens, torch.float32) for tokens in parts]
    losses = [cross_entropy(each[:-1], torch.tensor(tokens[1:])) for each, tokens in zip(exact, parts, strict=True)]
    print(f"{len(parts)} texts of {ends[-1]} tokens, {sum(losses) / len(losses):.2f} nats a token", flush=True)
    for name, others in RUNS.items():
        pairs = [compared(each, logits(folder, tokens, *others)) for each, tokens in zip(exact, parts, strict=True)]
        rows = torch.stack(pairs)  # [texts, 2, tokens]
        for start, end in zip((0, *ends), ends, strict=False):
            kl, same = rows[:, :, start:end].mean((0, 2)).tolist()
            print(f"  {name}, positions {start} to {end}: KL {kl:.2e}, same top token {same:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=13.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or Path(made)
        if options.model is None:
            train(60 * options.minutes, folder)
        encode = open_model(str(folder)).tokenizer.encode if options.model else lambda text: list(text.encode())
        parts = sorted((encode(text) for text in texts()[1]), key=len, reverse=True)
        measure(folder, [tokens[:SHORT] for tokens in parts[:6]], (SHORT,))
        measure(folder, [tokens[:LONG] for tokens in parts[:4] if len(tokens) >= LONG], ENDS)


if __name__ == "__main__":
    main()
