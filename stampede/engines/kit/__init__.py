"""What engines are built of, once for all of them. Nothing in here knows an engine.

errands.py                   what blocks, seen from an event loop: threads of an engine's own
pipe.py, wire.py             the connection of a loop: what one turn asks goes out together
sock.py                      a connection of the blocking colour
replies.py                   what a server says, as it comes in pieces
feed.py, stamps.py           news of changes, and what they void
together.py                  many verbs at once, for blocking callers
dates.py                     the clock of a service, by the dates of its answers
rests.py                     before who is refused asks again
overdue.py                   time-outs for clients that have none
turns.py                     so many questions under way at once
vigil.py                     a server that hangs is found out once, for all who wait
timer.py                     looks after questions of an event loop, as long as there are some
transport.py                 ends of connections from outside of their loop, and behind a fork
"""
