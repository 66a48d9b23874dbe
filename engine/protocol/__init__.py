"""Episodes as tokens: passages cut to fit, text encoded, segments with their sources.

It holds code that decides which tokens a model sees, and no code that computes with a model.
"""
