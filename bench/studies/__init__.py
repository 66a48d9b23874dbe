"""`thresher study`: small experiments that each test one claim of the method, as separate commands.

A study runs in minutes on a CPU, uses the product's own code rather than a sketch of it, prints a table, and writes its
figures and a picture into one folder. It reports the results, whatever they are. Deliberately absent: anything that
training imports; a study uses the engine, never the other way round.
"""
