"""The command line: `stampede demo`, `check`, `get`, `invalidate`, `stats`, `locks`, `postgres init`."""
