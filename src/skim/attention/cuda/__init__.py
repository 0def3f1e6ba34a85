"""Attention on CUDA devices: Triton kernels over the paged pool."""
