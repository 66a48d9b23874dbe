"""`thresher report`: a run folder as one HTML page, with its charts and excerpts of its trajectories.
Comes in: engine/config, engine/console.py, engine/store, engine/systems, policy, retrieval/data, retrieval/indexes,
rewards.
"""
