"""Tensors: what users compute with. They record graphs, and compute nothing until a value is asked for."""
