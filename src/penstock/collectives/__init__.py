"""Ranks that exchange arrays: the engines behind `ps.distributed`, and the thread that drives them."""
