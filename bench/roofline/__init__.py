"""`thresher bench roofline`: the least that a decode step and an update take on GPUs that are not here; predictions.

models.py      the sizes of Qwen2.5
run.py         the command: two tables and JSON lines, of the formulas in engine/planning/time.py
"""
