"""The step of a host-driven runner, written once: the host reads each step's verdict before it drafts.

PyTorch (CPU) and MLX provide a ``HostModel``: the target model, its caches and sampling as arrays of their own. All
decisions (who samples, what is accepted, what the MTP head is fed, where drafts end) are made here, in plain Python.
"""
