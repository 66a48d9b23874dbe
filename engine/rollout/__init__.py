"""Rollout: many episodes at once, on the decoder. Branches of a trajectory, its calls, and trees of samples."""
