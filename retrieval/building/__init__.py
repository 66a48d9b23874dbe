"""Building an index: the plan, encoding, structures that survive a kill, calibration.
Comes in: policy, retrieval/data, retrieval/encoders, retrieval/indexes, retrieval/questions.py, retrieval/retriever.py,
rewards.
"""
