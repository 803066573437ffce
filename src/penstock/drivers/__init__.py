"""Drivers: a file or folder for each programming interface, all behind the interface in `driver.py`."""
