"""`thresher study systems`: every system trained from one base a seed, ARENA from its own, beside a control.
Imports: engine/assemble.py, engine/config, engine/console.py, engine/reporting, engine/store, engine/synthetic,
engine/training, policy, rewards.
"""
