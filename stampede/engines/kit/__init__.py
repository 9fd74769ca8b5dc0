"""Building blocks of engines: connections, pools, news from servers, polling. No module here knows a particular engine.

Begin with `pool.py` for blocking callers, and with `pipe.py` for event loops."""
