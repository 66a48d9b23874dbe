"""What a run leaves on the disk: its folder, metrics, checkpoints and the journal of trajectories.
Comes in: engine/config, policy, retrieval/data, rewards.
"""
