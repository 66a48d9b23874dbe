"""Benchmarks: what a step, a rollout or a kernel costs here, beside a peer measured in the same run.

Every benchmark first proves that what it times is right, then times it, and writes one JSON line per run: the commit,
the machine, the versions, the shapes, p20/p50/p80 of ours and theirs, and their ratio. `results/` keeps the lines.
"""
