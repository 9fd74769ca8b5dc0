-- The tables of stampede's Postgres engine. `stampede postgres init` creates them. If this is run by hand, they belong
-- to the role that runs it.
--
-- The `id` of a key, a lock or a limit is a hash of its name, and identifies it in every table; `name` is the name
-- itself, for people. Moments are seconds by this server's clock, as it is then, not as the transaction began.

CREATE SCHEMA IF NOT EXISTS stampede;

-- Values. A plain SELECT by the primary key is a hit. There is no other index, so that most updates are HOT updates.
CREATE UNLOGGED TABLE stampede.entries (
    id bytea PRIMARY KEY,
    name bytea NOT NULL,
    entry bytea NOT NULL,         -- the id of the computation that made it
    fresh float8 NOT NULL,        -- the end of its fresh time
    keep float8 NOT NULL,         -- the end of the time in which it may be served stale
    gone float8 NOT NULL,         -- from then on it is of no use
    stored float8 NOT NULL,
    cost float8 NOT NULL,
    margin float8 NOT NULL,
    ttl float8 NOT NULL,
    raised bool NOT NULL,
    value bytea NOT NULL
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE stampede.entries ALTER COLUMN value SET STORAGE EXTERNAL;  -- compression is the codec's task

-- For each key the lease, the processes that wait for it, and the verdicts of failed computations. No row: none of
-- these.
CREATE UNLOGGED TABLE stampede.leases (
    id bytea PRIMARY KEY,
    name bytea NOT NULL,
    written float8 NOT NULL,
    token bytea,                  -- the lease's, if there is one
    taken float8,
    ends float8 NOT NULL DEFAULT '-infinity',
    holder text,                  -- host:pid
    pid int,                      -- the backend that is the holder's sign of life, and when it started: pids are reused
    started float8,
    homes text[],                 -- the processes to notify when the lease ends
    rest float8 NOT NULL DEFAULT '-infinity',  -- no lease is granted before that
    why text,
    tokens bytea[],               -- failed leases, the verdicts for their waiters, and how long these are valid
    verdicts text[],
    untils float8[]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The current generation of each scope. A new one ends all keys of the scope at once. '' stands for all scopes.
CREATE UNLOGGED TABLE stampede.generations (
    scope bytea PRIMARY KEY,
    id text NOT NULL,
    noted text[] NOT NULL DEFAULT '{}',    -- generations that ended a moment ago, and when
    ended float8[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);

-- The processes that have a local tier, by the backends that listen for them.
CREATE UNLOGGED TABLE stampede.keepers (
    home text NOT NULL,
    pid int NOT NULL,
    started float8 NOT NULL,
    PRIMARY KEY (pid, started)    -- not home: a late message of an old connection must not concern the new one
);

CREATE SEQUENCE stampede.fences;

-- The places in locks: a row for each holder, and for each waiter whose turn has come, whose place is reserved for
-- TURN = 0.2 s. An exclusive lock has room for one place.
CREATE TABLE stampede.locks (
    id      bytea NOT NULL,
    token   bytea NOT NULL,
    name    bytea,                            -- in UTF-8: this server's encoding may lack its characters
    room    float8 NOT NULL,                  -- how many places this one tolerates, itself included
    fence   bigint,                           -- NULL: the place is only reserved
    taken   float8,
    given   float8 NOT NULL,                  -- the last lease, in seconds
    ends    float8 NOT NULL,
    host    text,
    process int,
    program text,
    pid     int,                              -- the backend that is the holder's sign of life; NULL: there is none
    started float8,                           -- when the backend started: pids are reused
    server  text,                             -- the run of this server in which it started
    homes   text[] NOT NULL DEFAULT '{}',     -- processes that wait for its end without a place in the queue
    PRIMARY KEY (id, token)
) WITH (fillfactor = 70);

CREATE UNLOGGED TABLE stampede.waiting (
    id      bytea NOT NULL,
    arrival bigint NOT NULL,                  -- in microseconds
    token   bytea NOT NULL,
    home    text NOT NULL,                    -- the process to notify when its turn comes; '': none, the waiter polls
    pid     int,
    started float8,
    asked   float8 NOT NULL,                  -- when it last asked
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
    exception text,                           -- the exception's type
    message   text,
    traceback text,
    call      bytea                           -- the id of the release that wrote this row: it may be sent again
);
CREATE INDEX released_of ON stampede.released (id, number);

-- The current run of the server. UNLOGGED even in a durable schema: it is empty after a crash, and on a replica that
-- was promoted. Then the connections of before are gone, although their holders may be alive.
CREATE UNLOGGED /* always */ TABLE stampede.runs (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    id  text NOT NULL DEFAULT gen_random_uuid()
);

-- Backends of holders that are gone, and when that was first noticed.
CREATE UNLOGGED TABLE stampede.missed (
    pid     int NOT NULL,
    started float8 NOT NULL,
    since   float8 NOT NULL,
    PRIMARY KEY (pid, started)
);

-- Releases that are part of a transaction: they happen when it commits.
CREATE UNLOGGED TABLE stampede.releasing (
    id    bytea NOT NULL,
    token bytea NOT NULL
);

CREATE UNLOGGED TABLE stampede.limits (
    id     bytea PRIMARY KEY,     -- a hash of the name
    name   bytea NOT NULL,
    most   bigint NOT NULL,       -- the cost of all starts allowed
    per    bigint NOT NULL,       -- in a window of this length
    long   bigint NOT NULL,       -- how long a start is remembered,
    until  bigint NOT NULL,       -- at least until this moment
    rest   bigint NOT NULL,       -- no start before this moment
    seen   bigint NOT NULL,       -- when it was last asked
    firsts bigint[] NOT NULL,     -- groups of starts close to each other: the first moment of each,
    lasts  bigint[] NOT NULL,     -- the last,
    costs  bigint[] NOT NULL,     -- and the sum of their costs
    ends   bigint NOT NULL        -- the row is of no use after this moment
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
