"""Triton kernels, one file a topic. They know tensors only; with TRITON_INTERPRET=1 they run on the CPU, for tests."""
