"""The CUDA runner: a step that runs wholly on the device, in Triton kernels and captured graphs."""
