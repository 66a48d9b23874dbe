"""An episode in tokens: passages cut to fit, text encoded, segments with their sources.

Whatever decides which tokens a model sees may come in; nothing that computes with a model.
"""
