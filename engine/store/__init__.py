"""What survives a kill: run folders, checkpoints, JSONL journals.
Imports: engine/config, engine/optim, policy, retrieval/data, rewards.

Another thing kept on disk, whole or not at all, may come in; nothing that computes it.
"""
