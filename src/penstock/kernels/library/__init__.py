"""Products that a library computes: cuBLASLt, and the choice of its algorithms."""
