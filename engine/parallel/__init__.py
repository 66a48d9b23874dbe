"""Several processes, one run: ranks and their collectives, what they do together, and sharded weights.

Another way to shard a model (within a layer, say) may be added here; steps of training belong to engine/training.
"""
