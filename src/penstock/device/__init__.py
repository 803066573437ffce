"""Drivers: one file for each programming interface of devices, all with the same few verbs."""
