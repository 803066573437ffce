"""The graph: nodes of primitive operations. One table row holds all that is known of a primitive."""
