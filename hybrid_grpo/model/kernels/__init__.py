"""C kernels for CPUs, which build.py compiles, and Triton kernels for GPUs in gpu/.

The module that calls a kernel also has an implementation in torch, for where the kernel cannot be used.
"""
