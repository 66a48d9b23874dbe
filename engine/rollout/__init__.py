"""Rollout: episodes run side by side, on the decoder. Branches of a trajectory, its calls, and trees of samples."""
