"""`thresher bench decode`: whole decode steps of models of real sizes, beside their floor and what was predicted.
Imports: bench/machine.py, bench/measure.py, bench/roofline, bench/rows.py, engine/console.py, engine/decoding,
engine/planning, kernels/attention/backends, policy, rewards.

    run.py        the measurement and the command
"""
