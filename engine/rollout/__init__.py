"""Rollout: episodes run side by side, on the decoder. Branches of a trajectory, and its calls."""
