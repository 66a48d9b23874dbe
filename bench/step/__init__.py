"""`thresher bench step`: a whole GRPO step of ours, prefixes shared and unshared, beside one of TRL's.
Imports: bench/decode, bench/machine.py, bench/measure.py, bench/rollout, bench/roofline, bench/rows.py,
engine/config, engine/console.py, engine/machine.py, engine/packing, engine/protocol, engine/reporting,
engine/synthetic, engine/threads.py, engine/training, kernels, policy, rewards.

    shapes.py     what a step samples and trains, as data
    setting.py    model, prompts and reward, the same for both sides
    ours.py       our side; trl.py: TRL's
    run.py        proof and measurement; report.py: row and table; plot.py: the picture
"""
