"""`thresher bench step`: one GRPO step of ours beside one of TRL's.
Imports: bench/machine.py, bench/measure.py, engine/config, engine/console.py, engine/episode.py, engine/protocol,
engine/rollout, engine/synthetic, engine/training, kernels, policy, retrieval/questions.py, rewards.
"""
