"""What needs no download: an invented world, warm-up transcripts, random models, the demo.
Comes in: engine/assemble.py, engine/protocol, engine/systems, policy, retrieval/data, retrieval/encoders,
retrieval/indexes, retrieval/questions.py, rewards.
"""
