"""From a graph to values: the cache of executables, and what binds and replays a schedule."""
