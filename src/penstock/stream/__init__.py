"""Commands on their way to the device: recorded, submitted in batches, retired; copies, futures, views."""
