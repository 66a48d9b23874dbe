"""Several processes, one run: who takes part, what each does of a step, and weights of which each holds a share.

Another way to divide a model (within a layer, say) may come in; no step of training, which is engine/training's.
"""
