"""What a process does while an engine is down or slow, and how it keeps its leases alive meanwhile.

Here are the substitute that answers while an engine is down, and the thread that renews leases. Time-outs of a single
question belong to the engine's client. Begin with `outage.py`."""
