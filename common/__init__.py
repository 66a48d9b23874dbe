"""The lowest layer: errors, atomic files, records, hashes, locks, HTTP, the console, signals, the machine.

It imports no other Thresher package, and no torch at import time.
"""
