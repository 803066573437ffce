"""From a fused group to kernel IR: loops over its items, and any node's value at any coordinates."""
