"""Fusion: which nodes become one kernel. Pure functions from a graph to groups."""
