"""Device memory: layers from the driver to the pool, staging, and the account of every byte."""

from penstock.memory.budgeting import budget, plan
from penstock.memory.ledger import DeviceMemory, MemoryStats, stats, trim
from penstock.memory.pool import BufferPool, PoolStatistics
from penstock.memory.snapshots import snapshot

__all__ = [
    "BufferPool",
    "DeviceMemory",
    "MemoryStats",
    "PoolStatistics",
    "budget",
    "plan",
    "snapshot",
    "stats",
    "trim",
]
