"""Templates: kernels of a fixed form, each built once for all languages with `builder.py`."""
