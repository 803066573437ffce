"""Several ranks: processes of MPI, each with a device, that train one model together."""

from penstock.distributed.collective import all_gather, all_reduce, broadcast, reduce_scatter
from penstock.distributed.data_parallel import DataParallel
from penstock.distributed.ranks import barrier, init, patient, rank, run_local, size, traffic

__all__ = [
    "DataParallel",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "init",
    "patient",
    "rank",
    "reduce_scatter",
    "run_local",
    "size",
    "traffic",
]
