"""Chaos: random calls from several processes on a real engine, while all that can go wrong goes wrong; and a judge.

::

    make soak                                                # all engines, one after another
    make soak ARGS='--engine redis --minutes 20 --seed 7'
    make soak ARGS='--engine redis --seed 7 --round 13'      # one round of that again

A soak is a row of rounds of some twenty seconds. What a round does is drawn from its seed: which callers ask for what
(`plan.py`, `caller.py`), what goes wrong and when (`faults.py`), on which servers (`engines.py`). Each process
(`worker.py`) tells of every call, computation and lock when it begins and when it ends, by the machine's monotonic
clock. Afterwards `oracle.py` reads all of that and knows which values were allowed, which errors, how long a call may
take, and who may have computed at the same time as whom.

The same seed gives the same calls, origins and faults at the same moments. It can't give the same interleaving: how
threads, processes and packets meet is the machine's choice.
"""
