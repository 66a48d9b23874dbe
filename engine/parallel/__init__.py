"""One run on several processes: ranks and their collectives, joint operations of ranks, and sharded weights.

Other ways to shard a model, such as within a layer, may be added here; steps of training belong to engine/training.
"""
