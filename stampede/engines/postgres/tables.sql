-- The tables of stampede's Postgres engine. `stampede postgres init` makes them. When this is run by hand, they belong to
-- the role that runs it.
--
-- The `id` of a key, a lock or a limit is a hash of its name, and identifies it in every table; `name` is the name
-- itself, for people. Moments are seconds by the clock of this server, whatever its transactions began with.

CREATE SCHEMA IF NOT EXISTS stampede;

-- Values. A plain SELECT by the primary key is a hit. No other index: then most updates leave the one there is alone.
CREATE UNLOGGED TABLE stampede.entries (
    id bytea PRIMARY KEY,
    name bytea NOT NULL,
    entry bytea NOT NULL,         -- which computation's it is
    fresh float8 NOT NULL,        -- until then it is fresh
    keep float8 NOT NULL,         -- until then it is kept, and may be served stale
    gone float8 NOT NULL,         -- from then on nobody has any use for it
    stored float8 NOT NULL,
    cost float8 NOT NULL,
    margin float8 NOT NULL,
    ttl float8 NOT NULL,
    raised bool NOT NULL,
    value bytea NOT NULL
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE stampede.entries ALTER COLUMN value SET STORAGE EXTERNAL;  -- codecs compress what is to be compressed

-- Who computes a key, who waits for it, and what failed computations have left. No row: none of these.
CREATE UNLOGGED TABLE stampede.leases (
    id bytea PRIMARY KEY,
    name bytea NOT NULL,
    written float8 NOT NULL,
    token bytea,                  -- of the lease, if there is one
    taken float8,
    ends float8 NOT NULL DEFAULT '-infinity',
    holder text,                  -- host:pid
    pid int,                      -- the backend that is the holder's sign of life, and when it was started: pids come again
    started float8,
    homes text[],                 -- the processes to be told of the lease's end
    rest float8 NOT NULL DEFAULT '-infinity',  -- until then nobody is granted the key
    why text,
    tokens bytea[],               -- leases that have failed, what is said to those who waited for them, and until when
    verdicts text[],
    untils float8[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- What is changed to end all keys of a scope at once; '' is that of all scopes.
CREATE UNLOGGED TABLE stampede.generations (
    scope bytea PRIMARY KEY,
    id text NOT NULL,
    noted text[] NOT NULL DEFAULT '{}',    -- those that ended a moment ago, and when
    ended float8[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);

-- The processes that keep values of their own, by the backends that listen for them.
CREATE UNLOGGED TABLE stampede.keepers (
    home text NOT NULL,
    pid int NOT NULL,
    started float8 NOT NULL,
    PRIMARY KEY (pid, started)    -- a connection that was given up may say late that it comes, or goes: for itself alone
);

CREATE SEQUENCE stampede.fences;

-- The places in locks: a row for each holder, and for each waiter whose turn has come, for which its place is kept for
-- TURN = 0.2 s. An exclusive lock has room for one place.
CREATE TABLE stampede.locks (
    id      bytea NOT NULL,
    token   bytea NOT NULL,
    name    bytea,                            -- in UTF-8, which may hold what no text of this server can
    room    float8 NOT NULL,                  -- how many places there may be, as far as this one is concerned
    fence   bigint,                           -- NULL: the place is kept
    taken   float8,
    given   float8 NOT NULL,                  -- seconds, the last time
    ends    float8 NOT NULL,
    host    text,
    process int,
    program text,
    pid     int,                              -- the connection that is the holder's sign of life; NULL: there is none
    started float8,                           -- when that was made: pids come again
    server  text,                             -- on which run of this server
    homes   text[] NOT NULL DEFAULT '{}',     -- processes that wait for its end, without a place in the queue
    PRIMARY KEY (id, token)
) WITH (fillfactor = 70);

CREATE UNLOGGED TABLE stampede.waiting (
    id      bytea NOT NULL,
    arrival bigint NOT NULL,                  -- a microsecond
    token   bytea NOT NULL,
    home    text NOT NULL,                    -- the process, to be told of its turn; '': the waiter looks for itself
    pid     int,
    started float8,
    asked   float8 NOT NULL,                  -- the last time
    room    float8 NOT NULL,
    PRIMARY KEY (id, token)
);
CREATE INDEX waiting_in_order ON stampede.waiting (id, arrival);

CREATE TABLE stampede.released (
    number    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id        bytea NOT NULL,
    name      bytea NOT NULL,
    host      text,
    process   int,
    program   text,
    fence     bigint,
    taken     timestamptz,
    released  timestamptz NOT NULL,
    problem   text NOT NULL,                  -- '', 'failed', 'expired' or 'disconnected'
    exception text,                           -- its type
    message   text,
    traceback text,
    call      bytea                           -- the release that has written it, which may be sent again
);
CREATE INDEX released_of ON stampede.released (id, number);

-- Which run of the server this is. UNLOGGED also where nothing else is: it is empty after a crash, and on a replica that
-- was promoted. Then the connections of before are gone, and their holders are not.
CREATE UNLOGGED /* always */ TABLE stampede.runs (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    id  text NOT NULL DEFAULT gen_random_uuid()
);

-- Connections of holders that are gone, and when that was first noticed.
CREATE UNLOGGED TABLE stampede.missed (
    pid     int NOT NULL,
    started float8 NOT NULL,
    since   float8 NOT NULL,
    PRIMARY KEY (pid, started)
);

-- A release that is part of a transaction: it happens with the commit, and never if that doesn't.
CREATE UNLOGGED TABLE stampede.releasing (
    id    bytea NOT NULL,
    token bytea NOT NULL
);

CREATE UNLOGGED TABLE stampede.limits (
    id     bytea PRIMARY KEY,     -- a hash of the name
    name   bytea NOT NULL,
    most   bigint NOT NULL,       -- so many starts,
    per    bigint NOT NULL,       -- in a window of such a length
    long   bigint NOT NULL,       -- how long a start is remembered, as it is
    until  bigint NOT NULL,       -- until then
    rest   bigint NOT NULL,       -- nothing starts before
    seen   bigint NOT NULL,       -- the last time that it was asked
    firsts bigint[] NOT NULL,     -- starts that lie near to each other: from
    lasts  bigint[] NOT NULL,     -- to
    costs  bigint[] NOT NULL,     -- and what they cost in all
    ends   bigint NOT NULL        -- nothing of it matters after that
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
