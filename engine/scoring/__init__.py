"""From trajectories or foreign transcripts to rewards: judges are called first, then the reward is a pure function.

Other kinds of judges belong here; rewards themselves stay in rewards/.
"""
