"""Invented data: a world of facts, warm-up transcripts in every protocol, random models, the demo.
Imports: engine/assemble.py, engine/console.py, engine/protocol, engine/store, engine/systems, engine/threads.py,
policy, retrieval/building, retrieval/data, retrieval/encoders, retrieval/indexes, retrieval/questions.py, rewards,
rewards/papers.

Another generator may come in, as long as everything is a function of its seed.
"""
