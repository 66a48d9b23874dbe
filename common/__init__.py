"""The ground floor: errors, whole files, records, hashes, locks, HTTP, the console, signals, the machine.

It imports nothing of ours, and no torch.
"""
