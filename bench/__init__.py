"""Benchmarks: the cost of a step, a rollout or a kernel on this machine, compared with a peer in the same run.

Every benchmark first checks that the code it times is correct, then times it, and writes one JSON line per run: the
commit, the machine, the versions, the shapes, p20/p50/p80 of ours and theirs, and their ratio, stored in `results/`.
"""
