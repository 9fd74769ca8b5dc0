"""`stampede demo`: three herds of real processes on the disk engine, counted, timed and drawn."""
