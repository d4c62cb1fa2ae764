"""C kernels for float32 on a CPU, each with a torch fallback in the module that calls it; build.py compiles them."""
