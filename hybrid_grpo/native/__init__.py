"""Kernels in C for a CPU in float32."""
