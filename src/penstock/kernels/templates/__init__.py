"""Kernels of primitives that do not fuse, built in the kernel IR: one body for every language of GPUs."""
