"""`thresher bench step`: a whole GRPO step of ours, prefixes shared and unshared, beside one of TRL's.

shapes.py     what a step samples and trains, as data
setting.py    model, prompts and reward, the same for both sides
ours.py       our side; trl.py: TRL's
run.py        proof and measurement; report.py: row and table; plot.py: the picture
"""
