"""Commands of a device: recorded, submitted in batches, retired; copies, futures and host views."""
