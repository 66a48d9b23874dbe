"""A command each: its flags, its handler and what it prints.
Comes in: bench/studies/kl, bench/studies/mask, bench/studies/systems, cli/flags.py, engine/assemble.py,
engine/baselines, engine/config, engine/console.py, engine/evaluation, engine/extraction, engine/reporting,
engine/store, engine/synthetic, engine/systems, engine/training, policy, retrieval/building, retrieval/data,
retrieval/datasets, retrieval/encoders, retrieval/indexes, retrieval/questions.py, retrieval/serving, rewards.
"""
