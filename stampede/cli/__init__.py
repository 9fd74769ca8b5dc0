"""The command line: `stampede check`, `get`, `invalidate`, `stats`, `locks`, `limits`, `serve`, `postgres init`,
`diskcache import`.

Each command has a module, which reads its arguments and prints its results. The rooms below do what a command asks of a
cache or an engine. Begin with `command.py`."""
