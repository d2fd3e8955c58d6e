"""Opens runners on tiny checkpoints and drives them through the engine's own scheduler."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.config import EngineConfig, RunnerConfig
from slipstream.load.hf import open_hf
from slipstream.runners.torch.batch import RowSpan, make_batch
from slipstream.runners.torch.loading import Source, load_runner
from slipstream.runners.torch.runner import TorchRunner


def open_runner(
    folder: Path,
    *,
    head: bool = False,
    streams: int = 4,
    block_size: int = 8,
    dtype: str = "float32",
    kernels: bool = False,
    kv_memory: int | None = None,
    max_depth: int = 4,
) -> TorchRunner:
    checkpoint = open_hf(folder)
    engine = EngineConfig(max_streams=streams, block_size=block_size, max_depth=max_depth)
    config = RunnerConfig(device="cpu", dtype=dtype, kernels=kernels, draft_vocab=0, kv_memory=kv_memory)
    return load_runner(Source(checkpoint, checkpoint if head else None, "no head"), engine, config)


def trunk_logits(runner: TorchRunner, tokens: list[int], feeds: list[int], slot: int = 1) -> torch.Tensor:
    """Logits at every position, the prompt fed in pieces into scattered blocks. [tokens, vocab]"""
    table = runner.table.block_table
    table[slot] = torch.randperm(runner.info.num_blocks, generator=torch.Generator().manual_seed(0))[: table.shape[1]]
    if runner.gdn is not None:
        runner.gdn.reset(slot)
    pieces, start = [], 0
    with torch.inference_mode():
        for feed in feeds:
            batch = make_batch((RowSpan(slot, start, 0, feed),), tokens[start : start + feed], table)
            pieces.append(runner.decoder.unembed(runner.decoder.forward(batch)))
            start += feed
    return torch.cat(pieces)
