"""C kernels for float32 on a CPU, which build.py compiles, and Triton kernels for GPUs in gpu/.

Each has a torch path in the module that calls it.
"""
