"""Index folders: a file for each kind, the table of them (`kinds`), the manifest, and the door to any folder (`load`).

May come in: policy, rewards; of retrieval, all below building: data, questions, retriever, encoders, vectors.
"""
