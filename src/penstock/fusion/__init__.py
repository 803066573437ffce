"""Fusion: which nodes a kernel computes together. Pure functions from a graph to groups."""
