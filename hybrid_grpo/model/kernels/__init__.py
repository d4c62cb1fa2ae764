"""C kernels for float32 on a CPU, which build.py compiles, and Triton kernels for GPUs in gpu/.

The module that calls a kernel also has an implementation in torch, for where the kernel cannot be used.
"""
