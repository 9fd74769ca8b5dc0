"""Limits: how many calls may start in a window of time, and how many computations may run at once at an origin.

Here are the objects that users call, and the waiting for a start. Engines count the starts in a window, by the rules of
`model/limit_window.py`. Begin with `limiter.py`."""
