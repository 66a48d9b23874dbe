"""From trajectories, or anyone's transcripts, to rewards: judges are asked first, then the reward is a pure function.

Another kind of judge may come in; rewards themselves stay in rewards/.
"""
