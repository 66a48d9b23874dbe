"""The memory and time that a run needs, by arithmetic, before anything is loaded.

memory.py   bytes of every part at each moment of a run, and what of a recipe decides them
time.py     seconds of a step, by floors and the rates of a chip
plan.py     `plan`: whether the parts fit, and what makes them fit; the check when a run starts
"""
