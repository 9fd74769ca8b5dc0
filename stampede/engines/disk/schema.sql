-- Times are seconds of the machine's clock (kit/boot_clock.py). `number` is the 64-bit hash of a key or a name.

CREATE TABLE clock (one INTEGER PRIMARY KEY, boot TEXT, now REAL, wall REAL);

CREATE TABLE entries (
    number INTEGER PRIMARY KEY,
    key    BLOB NOT NULL,
    id     BLOB NOT NULL,
    fresh  REAL NOT NULL,
    keep   REAL NOT NULL,
    gone   REAL NOT NULL,  -- when the row may be removed: keep, or fresh and a grace for callers that were waiting
    cost   REAL NOT NULL,
    margin REAL NOT NULL,
    ttl    REAL NOT NULL,
    raised INTEGER NOT NULL,
    value  BLOB NOT NULL
);
CREATE INDEX entries_gone ON entries (gone);

-- The right to compute a key.
CREATE TABLE leases (
    number INTEGER PRIMARY KEY,
    token  BLOB NOT NULL,
    ends   REAL NOT NULL,
    holder TEXT NOT NULL,
    fence  INTEGER NOT NULL
);

-- A lock: its state as `dump` of `model/lock_queue.py` encodes it.
CREATE TABLE rooms (
    number INTEGER PRIMARY KEY,
    name   BLOB NOT NULL,
    state  BLOB NOT NULL,
    ends   REAL NOT NULL
);

-- The verdicts of abandoned leases, for their waiters, and until when the key rests, as `kit/failures.py` encodes them.
CREATE TABLE pasts (
    number INTEGER PRIMARY KEY,
    story  BLOB NOT NULL,
    ends   REAL NOT NULL
);

CREATE TABLE limits (name BLOB PRIMARY KEY, starts BLOB NOT NULL, ends INTEGER);
CREATE TABLE generations (scope TEXT PRIMARY KEY, generation TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE fences (one INTEGER PRIMARY KEY, last INTEGER NOT NULL);
