"""`thresher study`: small experiments that put one claim of the method to the test, each a command of its own.

A study runs in minutes on a CPU, goes through the product's own code rather than a sketch of it, prints a table, and
writes its figures and a picture into one folder. It reports what came out, whichever way that is. Deliberately absent:
anything that training imports; a study uses the engine, never the other way round.
"""
