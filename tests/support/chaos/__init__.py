"""Chaos: several processes make random calls on a real engine while faults occur. Then a judge checks the results.

::

    make soak                                                # all engines, one after another
    make soak ARGS='--engine redis --minutes 20 --seed 7'
    make soak ARGS='--engine redis --seed 7 --round 13'      # one round of that soak again

A soak consists of rounds of about twenty seconds. The seed of a round decides what happens in it: which callers ask for
what (`plan.py`, `caller.py`), and what goes wrong and when (`faults.py`), on which servers (`engines.py`). Each process
(`worker.py`) records when each call, computation and lock begins and ends, by the machine's monotonic clock. Afterwards
`oracle.py` reads these records. It knows which values and errors were allowed, how long a call may take, and which
callers may compute at the same time.

The same seed gives the same calls, origins and faults at the same moments. But threads, processes and packets meet in
another order each time, because that is the machine's choice.
"""
