"""Several processes, one run: who takes part, what each does of a step, and weights of which each holds a share.
Imports: engine/config, engine/console.py, engine/interrupt.py, engine/optim, engine/scoring, engine/store,
engine/systems, policy, rewards.

Another way to divide a model (within a layer, say) may come in; no step of training, which is engine/training's.
"""
