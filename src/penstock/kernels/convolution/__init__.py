"""Convolutions of images with the channels last, on CUDA devices."""
