"""Limits: how many calls may start in a window of time, and how many computations an origin bears at once.

Here is what a user calls, and how a caller waits for its turn. How a window is counted is decided by `model/window.py`,
in the engine. Begin with `limiter.py`.
"""
