"""Values and rules without input or output: each rule takes the state and the time, and returns the new state.

Here are entries, results, the state machines of keys, locks and limits, and the interfaces that engines implement.
Nothing in this room sleeps, sends, or reads a clock. Begin with `ports.py`, then `record.py`."""
