"""From trajectories, or anyone's transcripts, to rewards: judges are asked first, then the reward is a pure function.
Imports: engine/config, engine/console.py, engine/episode.py, engine/protocol, engine/store, engine/systems, policy,
retrieval/data, retrieval/encoders, retrieval/questions.py, retrieval/serving, rewards, rewards/papers.

Another kind of judge may come in; rewards themselves stay in rewards/.
"""
