"""Training: the GRPO loop, one optimiser step, SFT and its data.
Imports: engine/assemble.py, engine/baselines, engine/config, engine/console.py, engine/decoding, engine/episode.py,
engine/evaluation, engine/interrupt.py, engine/machine.py, engine/optim, engine/packing, engine/parallel,
engine/planning, engine/protocol, engine/refiners, engine/rollout, engine/scoring, engine/sinks, engine/store,
engine/systems, kernels, kernels/attention, kernels/attention/backends, policy, retrieval/data,
retrieval/questions.py, rewards, rewards/papers.
"""
