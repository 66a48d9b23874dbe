"""What a run needs of memory and time, by arithmetic, before anything is loaded.

plan.py          `plan`: the parts, whether they fit, what makes them fit
demand.py        the formulas of the parts, at each moment of a run
activations.py   what autograd keeps of a forward
setting.py       what of a recipe decides it
seconds.py       a step's time, by floors.py and the rates of a chip
links.py         what several GPUs send each other
floors.py        the least time of a decode step and of an update, and what is predicted of them
chips.py         data sheets of GPUs
sizes.py         weights of a model
check.py         the plan, checked when a run starts
"""
