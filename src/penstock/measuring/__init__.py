"""How fast this machine's devices are: measured here and nowhere else, and kept on disk.

`ceilings` are the best rates of a device, for profiles and advice; `rates` are times by size, for the device
`auto`; `workloads` is what both and the benchmarks run; `quiet` deals with a machine that others use, too.
"""
