"""Index folders: the table of kinds (`kinds`), FAISS's structures, searches, the manifest, the loading of any folder.

May come in: policy, rewards; of retrieval, all below building.
"""
