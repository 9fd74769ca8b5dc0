"""Values kept as objects inside the process, in front of a shared engine.

Here is which values are kept, which are evicted, and when a kept value may be returned. What is stored outside of the
process belongs to `engines`. Begin with `residents.py`."""
