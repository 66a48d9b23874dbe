"""`thresher bench retrieval`: indexes beside torch, numpy and FAISS, and a server under load.
Imports: bench/machine.py, bench/measure.py, bench/rows.py, engine/console.py, engine/machine.py, engine/reporting,
policy, retrieval/building, retrieval/data, retrieval/encoders, retrieval/indexes, retrieval/questions.py,
retrieval/vectors, rewards.
"""
