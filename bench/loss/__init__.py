"""`thresher bench loss`: the loss's forward and backward beside peers, over shapes, with error, time and memory.
Imports: bench/machine.py, bench/measure.py, bench/rows.py, engine/console.py, engine/planning, engine/reporting,
kernels, kernels/head, policy, rewards.
"""
