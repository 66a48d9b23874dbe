"""Index folders: the table of kinds (`kinds`), FAISS's structures, searches, the manifest, the loading of any folder.

May import policy, rewards and, of retrieval, all below building.
"""
