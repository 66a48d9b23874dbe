"""`thresher study kl`: KL estimators from one token to a training run.
Imports: engine/assemble.py, engine/config, engine/console.py, engine/reporting, engine/store, engine/synthetic,
engine/training, kernels, policy, retrieval/data, rewards.
"""
