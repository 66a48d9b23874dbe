"""AdamW on the trained weights: its step and schedule, its moments in 8 bits, what lies in CPU memory.

Another way to hold or to move what an optimiser needs may come in; no loss, and nothing that knows a trajectory.
"""
