"""The command line: `stampede check`, `get`, `invalidate`, `stats`, `locks`, `limits`, `serve`, `postgres init`.

A module for each command: its arguments, and what it prints. What a command does to a cache or an engine is done by the
rooms below. Begin with `command.py`.
"""
