"""From a corpus to an index folder: encode, resume, build the structure, measure recall; and plan all that beforehand.

May come in: policy, rewards; of retrieval, all but datasets and serving. `commands` is what `thresher index` does.
"""
