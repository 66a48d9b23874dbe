"""From a corpus to an index folder: encode, resume, build the structure, measure recall; and plan it beforehand.

May import policy, rewards and, of retrieval, all but datasets and serving. `commands` implements `thresher index`.
"""
