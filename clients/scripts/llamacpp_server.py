"""llama.cpp's server through the package xllamacpp, with its own defaults for prompt caching: prints its address and
serves until its input ends.

    python llamacpp_server.py MODEL.gguf THREADS
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def main() -> None:
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, num_threads = sys.argv[1], int(sys.argv[2])
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 8192, 0
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.verbosity = 0
    server = llama.Server(params)
    print(f"ADDRESS {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
