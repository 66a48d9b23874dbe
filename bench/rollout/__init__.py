"""`thresher bench rollout`: our rollout beside Hugging Face's `generate` and `generate_batch`.
Imports: bench/machine.py, bench/measure.py, bench/rows.py, engine/console.py, engine/decoding, engine/episode.py,
engine/protocol, engine/reporting, engine/rollout, engine/synthetic, kernels/attention/backends, policy,
retrieval/data, retrieval/questions.py, retrieval/retriever.py, rewards.
"""
