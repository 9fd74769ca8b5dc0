"""What a process does while an engine is down or slow: a substitute answers, and notices when the engine is back.

Here are also the invalidations that the engine could not make, which are repeated. Time-outs of a single question
belong to the engine's client. Begin with `outage.py`."""
