"""Besides our kernels' threads PyTorch has none of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from slipstream.runners.torch.threads import keep_to_this_thread


def test_the_thread_that_computes_keeps_pytorch_to_itself() -> None:
    before = torch.get_num_threads()

    def computes() -> int:
        keep_to_this_thread()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(computes).result() == 1
    assert torch.get_num_threads() == before, "a thread that has computed before keeps its number of threads"
