"""`thresher bench roofline`: the least that a decode step and an update take on GPUs that are not here; predictions.
Imports: bench/chips.py, bench/machine.py, bench/rows.py, engine/console.py, policy, rewards.

    models.py      the sizes of Qwen2.5, and how many weights and bytes follow from a model's sizes
    floors.py      the formulas: floor and prediction of a decode step and of an update
    run.py         the command: two tables and JSON lines
"""
