"""Keeps the leases of this process alive: leases on keys, on locks, and on a place among the callers of an origin.

Here is the thread that renews them while their holders live, and gives them back. Begin with `keeper.py`."""
