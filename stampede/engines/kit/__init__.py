"""What engines are made of: connections, pools, news from servers, polling. Nothing in here knows an engine.

Begin with `pool.py` for blocking callers, and with `pipe.py` for event loops.
"""
