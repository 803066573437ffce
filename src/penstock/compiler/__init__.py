"""From a graph to a schedule: one list of passes, each a pure function."""
