"""Triton kernels, one file a topic. They know tensors only; with TRITON_INTERPRET=1 they run on the CPU, for tests."""

import os

# Multiply and add in one instruction: as everything was measured, whatever a version of Triton does by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
