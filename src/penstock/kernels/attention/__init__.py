"""Attention and its gradient on tensor cores, as text of CUDA C."""
