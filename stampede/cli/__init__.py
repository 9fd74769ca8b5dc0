"""The command line: `stampede check`, `get`, `invalidate`, `stats`, `locks`, `postgres init`."""
