"""Kernels: from groups to source in a device's language, compiled and kept."""
