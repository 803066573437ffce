"""How fast this machine's devices are: all measurements of rates, kept on disk.

`ceilings` has the best rates of a device, for profiles and advice; `rates` has times by size, for the device
`auto`; `link` is the price of moving a value to the host, for memory budgets; `workloads` is what these and
the benchmarks run; `quiet` deals with other load on the machine.
"""
