"""What engines are built of, once for all of them. Nothing in here knows an engine."""
