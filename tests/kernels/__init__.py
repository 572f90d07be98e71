"""Kernels against their references, in the interpreter, on a GPU, and through the compilers of GPUs that are absent."""
