"""Drivers: one file or folder for each programming interface of devices, all with the same few verbs."""
