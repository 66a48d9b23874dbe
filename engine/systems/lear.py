"""LEAR, the first version of EviOmni: the same loop, reward and preset under its own name.

Its paper calls the weights of the reward's three parts alpha, the later one lambda. All else is in eviomni.py.
"""

from dataclasses import replace

from thresher.engine.episode import System
from thresher.engine.systems import eviomni

Options = eviomni.Options


def system(options: Options) -> System:
    return replace(eviomni.system(options), name="lear")
