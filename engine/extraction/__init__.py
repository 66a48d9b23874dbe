"""A trained extractor put to use: evidence from passages, read by other models or inside an agent's searches.

Another loop around an extractor may come in; how one is trained is its system's business.
"""
