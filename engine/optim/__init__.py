"""AdamW on the trained weights: step and schedule, moments in 8 bits, states in CPU memory.

Other ways to store or to move the states of an optimiser belong here; losses and trajectories do not.
"""
