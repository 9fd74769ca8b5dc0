"""Answers one call: from a key to a value, with one computation for all callers that want it.

Here are the six steps of the algorithm, and the parts of this process that they need. What an engine stores and
decides belongs to `engines`; rules that need no input or output belong to `model`. Begin with `fill.py`."""
