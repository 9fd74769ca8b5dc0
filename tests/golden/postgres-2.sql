-- What the Postgres engine of stampede keeps: values, the leases of those who compute them, generations, and who is to
-- be told of changes. Made by `stampede postgres init`; run it by hand as the one who is to own it.
--
-- A key's `id` is a hash of it, and stands for it everywhere; `name` is the key itself, for people. Moments are seconds
-- by the clock of this server, whatever its transactions began with. Whoever changes a key takes its lock first, for the
-- length of his transaction, and reads in later statements: each sees what was committed before the lock was had.

CREATE SCHEMA IF NOT EXISTS stampede;

CREATE FUNCTION stampede.version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2';

CREATE FUNCTION stampede.clock() RETURNS float8 LANGUAGE sql VOLATILE AS $$
    SELECT date_part('epoch', clock_timestamp())
$$;

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


-- Is this backend still there? One that is not known (or whose start we may not see) is believed to be.
CREATE FUNCTION stampede.lives(its_pid int, its_start float8) RETURNS bool LANGUAGE sql VOLATILE AS $$
    SELECT its_pid IS NULL OR EXISTS (
        SELECT FROM pg_stat_get_activity(its_pid) AS backend
        WHERE backend.backend_start IS NULL OR date_part('epoch', backend.backend_start) = its_start
    )
$$;

-- In front of every decision. With a snapshot for the whole transaction what was decided while we waited isn't seen.
CREATE FUNCTION stampede.alone(its_lock bigint) RETURNS float8 LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'stampede decides in transactions that are READ COMMITTED' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM stampede.lasting();
    END IF;
    PERFORM pg_advisory_xact_lock(its_lock);
    RETURN stampede.clock();
END $$;

-- What is answered outlives a crash, also where other commits here don't wait for the disk: or a fence would come twice,
-- and what was invalidated come back. (What changes unlogged tables alone waits for nothing.)
CREATE FUNCTION stampede.lasting() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'local', true);
END $$;

-- Behind every change of a key: tell those who keep it, with the commit. Who begins to keep takes the same lock alone.
CREATE FUNCTION stampede.tell(its bytea) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(8319104481669375077);
    IF EXISTS (SELECT FROM stampede.keepers) THEN
        PERFORM pg_notify('stampede', encode(substring(its FOR 2), 'hex'));
    END IF;
END $$;

CREATE FUNCTION stampede.keep(its_home text, its_pid int, its_start float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(8319104481669375077);  -- the changes under way have not seen us
    DELETE FROM stampede.keepers AS k WHERE NOT stampede.lives(k.pid, k.started);
    INSERT INTO stampede.keepers VALUES (its_home, its_pid, its_start) ON CONFLICT DO NOTHING;
END $$;


CREATE FUNCTION stampede.small(value bytea) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(value) <= 65536 THEN value END
$$;

-- The value, or the right to compute it. `answer` is 0: found, 1: granted, 2: busy, 3: failed. A large value is left out:
-- while it is sent the key is locked, and whoever is to hear it may be frozen.
CREATE FUNCTION stampede.claim(
    its bytea, its_lock bigint, its_name bytea, mine bytea, seconds float8, draw float8, since float8, seen bytea,
    awaited bytea, force bool, my_holder text, my_pid int, my_start float8, noting bool,
    OUT answer int, OUT entry bytea, OUT fresh float8, OUT keep float8, OUT cost float8, OUT margin float8,
    OUT ttl float8, OUT raised bool, OUT value bytea,
    OUT token bytea, OUT lease float8, OUT verdict text, OUT rest float8, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
    e stampede.entries;
    l stampede.leases;
    at int;
BEGIN
    SELECT * INTO e FROM stampede.entries WHERE id = its;
    IF e.stored > now + 1 THEN  -- the clock was set back: it has no more time than it was given
        UPDATE stampede.entries SET stored = now, fresh = fresh - (stored - now), keep = keep - (stored - now),
            gone = gone - (stored - now) WHERE id = its RETURNING * INTO e;
    END IF;
    IF e.id IS NOT NULL THEN
        entry := e.entry; fresh := e.fresh - now; keep := e.keep - now;
        cost := e.cost; margin := e.margin; ttl := e.ttl; raised := e.raised;
        IF NOT force AND e.entry IS DISTINCT FROM seen
            AND (fresh > 0 OR (fresh > -since AND e.gone > now))
            AND (draw IS NULL OR fresh > least(e.margin + draw * e.cost, e.ttl / 2)) THEN
            answer := 0; value := stampede.small(e.value);
            RETURN;
        END IF;
        IF keep > 0 THEN
            value := stampede.small(e.value);
        ELSE
            entry := NULL;
        END IF;
    END IF;

    SELECT * INTO l FROM stampede.leases WHERE id = its FOR UPDATE;  -- who is about to wait is noted there
    IF l.written > now + 1 THEN
        UPDATE stampede.leases SET written = now, ends = ends - (written - now), rest = rest - (written - now),
            untils = ARRAY(SELECT u - (written - now) FROM unnest(untils) AS u) WHERE id = its RETURNING * INTO l;
    END IF;
    IF NOT force AND l.id IS NOT NULL THEN
        at := array_position(l.tokens, awaited);
        IF at IS NOT NULL AND l.untils[at] > now THEN
            verdict := l.verdicts[at];
        ELSIF l.rest > now THEN
            verdict := l.why;
        END IF;
        IF verdict IS NOT NULL THEN
            answer := 3; rest := greatest(l.rest - now, 0);
            RETURN;
        END IF;
        IF l.ends > now AND l.token <> mine AND stampede.lives(l.pid, l.started) THEN
            answer := 2; token := l.token; lease := l.ends - now;
            RETURN;
        END IF;
    END IF;

    answer := 1;
    IF l.token <> mine THEN  -- it has fallen
        token := l.token; homes := l.homes;
        l.homes := NULL;
        IF noting AND NOT force THEN
            PERFORM stampede.note_loss(l, now);
        END IF;
    END IF;
    INSERT INTO stampede.leases AS leases (id, name, written, taken, token, ends, holder, pid, started)
        VALUES (its, its_name, now, now, mine, now + seconds, my_holder, my_pid, my_start)
        ON CONFLICT (id) DO UPDATE SET written = now, taken = now, token = mine, ends = now + seconds, holder = my_holder,
            pid = my_pid, started = my_start, homes = l.homes;
END $$;

-- Store if the lease stands. `homes` are to be told, if it stood.
CREATE FUNCTION stampede.fill(
    its bytea, its_lock bigint, its_name bytea, mine bytea, its_entry bytea, fresh float8, keep float8, gone float8,
    cost float8, margin float8, ttl float8, raised bool, value bytea, OUT done bool, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    DELETE FROM stampede.leases AS l WHERE l.id = its AND l.token = mine AND l.ends > now RETURNING l.homes INTO homes;
    done := FOUND;
    IF NOT done THEN  -- it was sent again, perhaps
        done := EXISTS (SELECT FROM stampede.entries AS e WHERE e.id = its AND e.entry = its_entry AND e.gone > now);
        RETURN;
    END IF;
    PERFORM stampede.store(its, its_name, its_entry, now, fill.fresh, fill.keep, fill.gone, fill.cost, fill.margin,
        fill.ttl, fill.raised, fill.value);
END $$;

CREATE FUNCTION stampede.store(
    its bytea, its_name bytea, its_entry bytea, now float8, fresh float8, keep float8, gone float8, cost float8,
    margin float8, ttl float8, raised bool, value bytea
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stampede.entries VALUES (its, its_name, its_entry, now + store.fresh, now + store.keep,
            now + store.gone, now, store.cost, store.margin, store.ttl, store.raised, store.value)
        ON CONFLICT (id) DO UPDATE SET entry = EXCLUDED.entry, fresh = EXCLUDED.fresh, keep = EXCLUDED.keep,
            gone = EXCLUDED.gone, stored = EXCLUDED.stored, cost = EXCLUDED.cost, margin = EXCLUDED.margin,
            ttl = EXCLUDED.ttl, raised = EXCLUDED.raised, value = EXCLUDED.value;
    PERFORM stampede.tell(its);
END $$;

-- Drop the lease if it stands; leave a verdict (to be told for `told` seconds) and a rest.
CREATE FUNCTION stampede.abandon(
    its bytea, its_lock bigint, mine bytea, its_verdict text, told float8, its_rest float8, its_why text,
    OUT done bool, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
    l stampede.leases;
BEGIN
    SELECT * INTO l FROM stampede.leases WHERE id = its AND token = mine AND ends > now FOR UPDATE;
    done := FOUND;
    IF NOT done THEN
        RETURN;
    END IF;
    homes := l.homes;
    IF its_verdict IS NOT NULL THEN
        SELECT array_agg(t ORDER BY u, n), array_agg(v ORDER BY u, n), array_agg(u ORDER BY u, n)
            INTO l.tokens, l.verdicts, l.untils
            FROM (
                SELECT * FROM unnest(l.tokens, l.verdicts, l.untils) WITH ORDINALITY AS past (t, v, u, n)
                    WHERE u > now AND t <> mine
                UNION ALL SELECT mine, its_verdict, now + told, 1000
                ORDER BY 3 DESC, 4 DESC LIMIT 64
            ) AS past;
    END IF;
    IF its_rest > 0 THEN
        l.rest := now + its_rest; l.why := its_why;
    END IF;
    IF l.tokens IS NULL AND l.rest <= now THEN
        DELETE FROM stampede.leases WHERE id = its;
    ELSE
        UPDATE stampede.leases SET written = now, token = NULL, ends = '-infinity', holder = NULL, pid = NULL,
            started = NULL, homes = NULL, rest = l.rest, why = l.why, tokens = l.tokens, verdicts = l.verdicts,
            untils = l.untils WHERE id = its;
    END IF;
END $$;

-- Mark the lease as waited for by a process; false: there is nothing to wait for.
CREATE FUNCTION stampede.await(its bytea, awaited bytea, my_home text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    IF my_home IS NOT NULL THEN
        UPDATE stampede.leases SET homes = array_append(homes, my_home)
            WHERE id = its AND token = awaited AND (homes IS NULL OR my_home <> ALL (homes));
    END IF;
    RETURN EXISTS (
        SELECT FROM stampede.leases
        WHERE id = its AND token = awaited AND ends > stampede.clock() AND stampede.lives(pid, started)
    );
END $$;

-- What is no computation ends the one under way: `token` is that of the lease that has fallen.

CREATE FUNCTION stampede.set(
    its bytea, its_lock bigint, its_name bytea, its_entry bytea, fresh float8, keep float8, gone float8, cost float8,
    margin float8, ttl float8, raised bool, value bytea, OUT token bytea, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    DELETE FROM stampede.leases AS l WHERE l.id = its RETURNING l.token, l.homes INTO token, homes;
    PERFORM stampede.store(its, its_name, its_entry, now, set.fresh, set.keep, set.gone, set.cost, set.margin,
        set.ttl, set.raised, set.value);
END $$;

-- Store if what is kept has the id that was seen (NULL: nothing is kept).
CREATE FUNCTION stampede.replace(
    its bytea, its_lock bigint, its_name bytea, seen bytea, its_entry bytea, fresh float8, keep float8, gone float8,
    cost float8, margin float8, ttl float8, raised bool, value bytea, OUT done bool, OUT token bytea, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
    there bytea := (SELECT e.entry FROM stampede.entries AS e WHERE e.id = its AND e.keep > now);
BEGIN
    done := there IS NOT DISTINCT FROM seen;
    IF NOT done THEN
        done := there IS NOT DISTINCT FROM its_entry;  -- it was sent again
        RETURN;
    END IF;
    DELETE FROM stampede.leases AS l WHERE l.id = its RETURNING l.token, l.homes INTO token, homes;
    PERFORM stampede.store(its, its_name, its_entry, now, replace.fresh, replace.keep, replace.gone, replace.cost,
        replace.margin, replace.ttl, replace.raised, replace.value);
END $$;

-- Stale from now on, and kept as long as it would have been. `done`: there was something fresh.
CREATE FUNCTION stampede.expire(its bytea, its_lock bigint, OUT done bool, OUT token bytea, OUT homes text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    UPDATE stampede.entries SET stored = least(stored, now), fresh = now, gone = greatest(keep, now + 1)
        WHERE id = its AND fresh > now;
    done := FOUND;
    PERFORM stampede.tell(its);  -- also where it is not here: it may have been removed, and be kept elsewhere
    SELECT l.token, l.homes INTO token, homes FROM stampede.leases AS l WHERE l.id = its FOR UPDATE;
    IF token IS NOT NULL THEN
        UPDATE stampede.leases SET written = now, token = NULL, ends = '-infinity', homes = NULL WHERE id = its;
        DELETE FROM stampede.leases WHERE id = its AND tokens IS NULL AND rest <= now;
    END IF;
END $$;

-- Nothing is left. `done`: there was a value.
CREATE FUNCTION stampede.invalidate(its bytea, its_lock bigint, OUT done bool, OUT token bytea, OUT homes text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
    kept float8;
BEGIN
    DELETE FROM stampede.leases AS l WHERE l.id = its RETURNING l.token, l.homes INTO token, homes;
    DELETE FROM stampede.entries AS e WHERE e.id = its RETURNING e.keep INTO kept;
    done := coalesce(kept > now, false);
    PERFORM stampede.tell(its);
END $$;


-- Today's generation of each of these scopes, and those that ended within the last seconds. One that is missing is new:
-- old ones never come back.
CREATE FUNCTION stampede.generations(asked bytea[], new text[], lately float8)
RETURNS TABLE (id text, noted text[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (  -- or a server that only reads would refuse this, with nothing to write
        SELECT FROM unnest(asked) AS a (scope)
        WHERE NOT EXISTS (SELECT FROM stampede.generations AS there WHERE there.scope = a.scope)
    ) THEN
        INSERT INTO stampede.generations AS g (scope, id)
            SELECT a.scope, a.id FROM unnest(asked, new) AS a (scope, id) ON CONFLICT (scope) DO NOTHING;
    END IF;
    RETURN QUERY SELECT g.id, ARRAY(
            SELECT old.id FROM unnest(g.noted, g.ended) AS old (id, ended) WHERE old.ended > stampede.clock() - lately
        ) FROM unnest(asked) WITH ORDINALITY AS a (scope, n) JOIN stampede.generations AS g ON g.scope = a.scope
        ORDER BY a.n;
END $$;

CREATE FUNCTION stampede.bump(its bytea, new text, most int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stampede.generations AS g (scope, id) VALUES (its, new)
        ON CONFLICT (scope) DO UPDATE SET id = new, noted = (g.id || g.noted)[:most],
            ended = (stampede.clock() || g.ended)[:most];
    PERFORM pg_notify('stampede', 'g');
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM stampede.lasting();
    END IF;
END $$;

-- Another softer part, behind a `~`.
CREATE FUNCTION stampede.soften(its bytea, new text, softer text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stampede.generations AS g (scope, id) VALUES (its, new || '~' || softer)
        ON CONFLICT (scope) DO UPDATE SET id = split_part(g.id, '~', 1) || '~' || softer;
    PERFORM pg_notify('stampede', 'g');
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM stampede.lasting();
    END IF;
END $$;


-- Remove what nobody needs any more among some entries, and among some leases, in the order of their ids from any on;
-- two who do this at once go round each other. Ids are hashes: how close they stand to each other tells how many there
-- are, without a count. Where that is more than `room`, or their values are larger in all than `bytes`, so many of them
-- are evicted as are too many: the stale ones first, then the oldest. `over`: how many were removed.
CREATE FUNCTION stampede.sweep(start bytea, most int, room float8, bytes float8, OUT over int, OUT about float8)
LANGUAGE plpgsql AS $$
DECLARE
    now float8 := stampede.clock();
    seen int;
    size float8;
    last bytea;
    part float8;
    left_over int;
BEGIN
    SELECT count(*), sum(s.size), (array_agg(s.id ORDER BY s.id DESC))[1] INTO seen, size, last FROM (
        SELECT e.id, octet_length(e.value) AS size FROM stampede.entries AS e
        WHERE e.id >= start ORDER BY e.id LIMIT most
    ) AS s;
    DELETE FROM stampede.leases WHERE id IN (
        SELECT l.id FROM stampede.leases AS l
        WHERE l.id >= start AND l.ends <= now AND l.rest <= now AND NOT (l.untils IS NOT NULL AND now < ANY (l.untils))
        ORDER BY l.id LIMIT most FOR UPDATE SKIP LOCKED
    );
    DELETE FROM stampede.keepers AS k WHERE NOT stampede.lives(k.pid, k.started);  -- or all are told of it for nobody
    over := 0; about := 0;
    IF seen = 0 THEN
        RETURN;
    END IF;
    DELETE FROM stampede.entries WHERE id IN (
        SELECT e.id FROM stampede.entries AS e
        WHERE e.id >= start AND e.id <= last AND e.gone <= now ORDER BY e.id FOR UPDATE SKIP LOCKED
    );
    GET DIAGNOSTICS over = ROW_COUNT;
    part := (CASE WHEN seen < most THEN 1 ELSE stampede.place(last) END) - stampede.place(start);
    about := seen / part;
    left_over := ceil(seen * (1 - least(room / about, bytes / nullif(size / part, 0), 1))) - over;
    IF left_over > 0 THEN
        DELETE FROM stampede.entries WHERE id IN (
            SELECT e.id FROM stampede.entries AS e JOIN (
                SELECT o.id, o.stored FROM stampede.entries AS o WHERE o.id >= start AND o.id <= last
                ORDER BY o.fresh > now, o.stored LIMIT left_over
            ) AS old ON e.id = old.id AND e.stored = old.stored
            ORDER BY e.id FOR UPDATE OF e SKIP LOCKED
        );
        GET DIAGNOSTICS left_over = ROW_COUNT;
        over := over + left_over;
    END IF;
END $$;

-- Where an id stands among all that are possible, from 0 to 1.
CREATE FUNCTION stampede.place(its bytea) RETURNS float8 LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x' || encode(substring(its FOR 6), 'hex'))::bit(48)::bigint / 281474976710656.0::float8
$$;


-- Locks that are no cache, and the record of how each was held.
--
-- Every function that changes a lock waits for its turn with the lock's id, and reads in later statements: those see
-- what whoever was before it has committed. Who waits for a lock takes a place with the first refusal, in the order of
-- arrival. Whenever the lock comes free it is kept for the first of the queue, for TURN = 0.2 s, and only that one is
-- told: by the process that was answered, outside of this (`homes` says where to, and `told` what).

CREATE SEQUENCE stampede.fences;

CREATE TABLE stampede.locks (
    id        bytea PRIMARY KEY,              -- a hash of the name
    name      bytea NOT NULL,                 -- in UTF-8, which may hold what no text of this server can
    token     bytea,                          -- of who has it; NULL: nobody, or it is kept for whose turn it is
    fence     bigint NOT NULL,
    taken     float8,
    given     float8,                         -- seconds, the last time
    ends      float8,
    host      text,
    process   int,
    program   text,
    pid       int,                            -- the connection that is its holder's sign of life; NULL: there is none
    started   float8,                         -- when that was made, as pids come again
    server    text,                           -- on which run of this server
    session   boolean NOT NULL DEFAULT false, -- that connection is the one that the holder works on
    turn      bytea,                          -- the token that it is kept for
    turn_ends float8,
    turn_home text,
    homes     text[] NOT NULL DEFAULT '{}'    -- of processes in which somebody waits without a place
) WITH (fillfactor = 70);

CREATE UNLOGGED TABLE stampede.waiting (
    id      bytea NOT NULL,
    arrival bigint NOT NULL,                  -- a microsecond
    token   bytea NOT NULL,
    home    text NOT NULL,                    -- '': it looks for itself
    pid     int,
    started float8,
    asked   float8 NOT NULL,                  -- the last time
    PRIMARY KEY (id, token)
);
CREATE INDEX waiting_in_order ON stampede.waiting (id, arrival);

CREATE TABLE stampede.released (
    number    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind      text NOT NULL DEFAULT 'lock',   -- or 'computation', of which the failed ones are here, if that is wanted
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

-- (What each lock calls is plpgsql, which keeps plans: a function of the language sql is planned in each transaction.)
CREATE FUNCTION stampede.run() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT r.id || ' ' || floor(date_part('epoch', pg_postmaster_start_time()) * 1000000)::bigint
        FROM stampede.runs r
    );
END $$;

CREATE FUNCTION stampede.begin_run() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM stampede.runs) THEN
        INSERT INTO stampede.runs DEFAULT VALUES ON CONFLICT DO NOTHING;
    END IF;
    RETURN stampede.run();
END $$;

-- Its holder's connection is gone, and it wasn't the server's doing; of the one that it works on, however that went.
CREATE FUNCTION stampede.gone(its stampede.locks) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN its.pid IS NOT NULL AND NOT stampede.lives(its.pid, its.started)
        AND (its.session OR its.server IS NOT DISTINCT FROM stampede.run());
END $$;

-- From here to the end of the transaction nobody else changes this lock. Answers what time it is then.
CREATE FUNCTION stampede.alone_with(_id bytea) RETURNS float8 LANGUAGE sql AS $$
    SELECT stampede.alone(('x' || encode(substr(_id, 1, 8), 'hex'))::bit(64)::bigint)
$$;

-- Text, as far as this server's encoding has room for it.
CREATE FUNCTION stampede.readable(raw bytea) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN convert_from(raw, 'UTF8');
EXCEPTION WHEN OTHERS THEN
    RETURN encode(raw, 'escape');
END $$;

CREATE FUNCTION stampede.note(
    its stampede.locks, _released float8, _problem text,
    _call bytea DEFAULT NULL, _exception bytea DEFAULT NULL, _message bytea DEFAULT NULL, _traceback bytea DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stampede.released (
        id, name, host, process, program, fence, taken, released, problem, exception, message, traceback, call
    ) SELECT
        its.id, its.name, its.host, its.process, its.program, its.fence, to_timestamp(its.taken), to_timestamp(_released),
        _problem, stampede.readable(_exception), stampede.readable(_message), stampede.readable(_traceback), _call
    WHERE substr(its.name, 1, 10) <> 'computing\000'::bytea;  -- that is a lease of values that are kept elsewhere
END $$;

-- The next of the queue whose process lives; it leaves the queue, and has the turn.
CREATE FUNCTION stampede.next_of(_id bytea, OUT token bytea, OUT home text) LANGUAGE plpgsql AS $$
DECLARE
    first stampede.waiting;
BEGIN
    LOOP
        DELETE FROM stampede.waiting w USING (
            SELECT q.token FROM stampede.waiting q WHERE q.id = _id ORDER BY q.arrival LIMIT 1
        ) f WHERE w.id = _id AND w.token = f.token RETURNING w.* INTO first;
        IF first.id IS NULL THEN
            RETURN;
        END IF;
        -- Who has no connection to live by may be dead; it costs a turn, and nothing if it was long ago.
        IF (CASE WHEN first.pid IS NULL THEN first.asked > stampede.clock() - 120
                 ELSE stampede.lives(first.pid, first.started) END) THEN
            token := first.token;
            home := first.home;
            RETURN;
        END IF;
    END LOOP;
END $$;

-- How many are before this place in the queue, up to a thousand.
CREATE FUNCTION stampede.before(_id bytea, _arrival bigint) RETURNS int LANGUAGE sql AS $$
    SELECT count(*)::int FROM (
        SELECT FROM stampede.waiting w WHERE w.id = _id AND w.arrival < _arrival LIMIT 1000
    ) others
$$;

-- It is nobody's any more: kept for the next, or gone. Answers whom to tell, and what.
CREATE FUNCTION stampede.set_free(its stampede.locks, OUT told bytea, OUT homes text[])
LANGUAGE plpgsql AS $$
DECLARE
    following record;
BEGIN
    SELECT * INTO following FROM stampede.next_of(its.id);
    told := coalesce(following.token, '');
    IF following.token IS NULL THEN
        homes := its.homes;
        DELETE FROM stampede.locks l WHERE l.id = its.id;
    ELSE
        homes := array_remove(ARRAY[following.home], '');
        UPDATE stampede.locks l
        SET token = NULL, pid = NULL, session = false, turn = following.token, turn_home = following.home,
            turn_ends = stampede.clock() + 0.2
        WHERE l.id = its.id;
    END IF;
END $$;

-- Take the lock, or say who has it, and take a place in the queue (`_arrival`: the one that was given before). Of the
-- record, what is older than `_age` seconds, or than the last `_rows`, is forgotten by and by.
CREATE FUNCTION stampede.acquire(
    _id bytea, _name bytea, _token bytea, _lease float8, _host text, _process int, _program text,
    _pid int, _started float8, _waits boolean, _home text, _arrival bigint, _age float8, _rows bigint, _room float8,
    OUT granted boolean, OUT number bigint, OUT holder bytea, OUT rest float8, OUT place bigint, OUT ahead int,
    OUT told bytea, OUT homes text[]
) LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
    moment float8 := stampede.alone_with(_id);
    following record;
BEGIN
    SELECT * INTO its FROM stampede.locks l WHERE l.id = _id;
    granted := false;
    IF its.ends > moment + its.given THEN  -- the clock was set back: it has no more time than it was given
        its.ends := moment + its.given;
        UPDATE stampede.locks l SET ends = its.ends WHERE l.id = _id;
    END IF;
    IF its.crowd OR _room <> 1 THEN
        SELECT e.* INTO granted, number, holder, rest, place, ahead, told, homes
        FROM stampede.enter(
            its, moment, _id, _name, _token, _lease, _host, _process, _program, _pid, _started, _waits, _home,
            _arrival, _age, _rows, _room
        ) e;
        RETURN;
    END IF;
    IF its.token = _token AND its.ends > moment THEN  -- the reply was lost
        UPDATE stampede.locks l
        SET ends = moment + _lease, given = _lease, pid = _pid, started = _started,
            server = CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END
        WHERE l.id = _id;
        granted := true;
        number := its.fence;
        RETURN;
    END IF;
    IF its.token IS NOT NULL THEN
        IF its.ends <= moment THEN
            PERFORM stampede.note(its, its.ends, 'expired');
            its.token := NULL;
        ELSIF stampede.gone(its) THEN
            PERFORM stampede.note(its, moment, 'disconnected');
            its.token := NULL;
        END IF;
        IF its.token IS NOT NULL THEN
            holder := its.token;
            rest := its.ends - moment;
        ELSE  -- who waits without a place finds out by himself
            its.turn := NULL;
        END IF;
    END IF;
    IF holder IS NULL AND its.turn_ends BETWEEN moment AND moment + 0.2 THEN
        holder := its.turn;
        rest := its.turn_ends - moment;
    END IF;
    IF holder IS NULL THEN  -- it has come free by itself, or the one whose turn it was didn't come
        IF _waits AND _arrival IS NOT NULL THEN
            INSERT INTO stampede.waiting VALUES (_id, _arrival, _token, _home, _pid, _started, moment)
            ON CONFLICT DO NOTHING;
        END IF;
        SELECT * INTO following FROM stampede.next_of(_id);
        IF following.token <> _token THEN
            INSERT INTO stampede.locks AS l (id, name, fence, turn, turn_home, turn_ends)
            VALUES (_id, _name, 0, following.token, following.home, moment + 0.2)
            ON CONFLICT (id) DO UPDATE
            SET token = NULL, pid = NULL, session = false, turn = excluded.turn, turn_home = excluded.turn_home,
                turn_ends = excluded.turn_ends;
            holder := following.token;
            rest := 0.2;
            told := following.token;
            homes := array_remove(ARRAY[following.home], '');
        END IF;
    END IF;
    IF holder IS NULL OR (its.token IS NULL AND holder = _token) THEN
        granted := true;
        number := nextval('stampede.fences');
        INSERT INTO stampede.locks AS l (
            id, name, token, fence, taken, given, ends, host, process, program, pid, started, server
        ) VALUES (
            _id, _name, _token, number, moment, _lease, moment + _lease, _host, _process, _program, _pid, _started,
            CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END
        )
        ON CONFLICT (id) DO UPDATE
        SET token = excluded.token, fence = excluded.fence, taken = excluded.taken, given = excluded.given,
            ends = excluded.ends, host = excluded.host, process = excluded.process, program = excluded.program, pid = excluded.pid,
            started = excluded.started, server = excluded.server, session = false, turn = NULL, turn_home = NULL,
            turn_ends = NULL;
        DELETE FROM stampede.waiting w WHERE w.id = _id AND w.token = _token;
        holder := NULL;
        rest := NULL;
        PERFORM stampede.prune(_age, _rows, 4);  -- its release writes one
        RETURN;
    END IF;
    IF _waits THEN
        place := coalesce(_arrival, greatest(
            floor(moment * 1000000)::bigint,
            (SELECT w.arrival + 1 FROM stampede.waiting w WHERE w.id = _id ORDER BY w.arrival DESC LIMIT 1)
        ));
        INSERT INTO stampede.waiting AS w VALUES (_id, place, _token, _home, _pid, _started, moment)
        ON CONFLICT (id, token) DO UPDATE
        SET home = excluded.home, pid = excluded.pid, started = excluded.started, asked = excluded.asked
        RETURNING w.arrival INTO place;
        ahead := stampede.before(_id, place);
    END IF;
END $$;

-- Let the lock stand for so long from now, by this connection. false: it is lost.
CREATE FUNCTION stampede.renew(_id bytea, _token bytea, _lease float8, _pid int, _started float8)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
    moment float8 := stampede.alone_with(_id);
BEGIN
    SELECT * INTO its FROM stampede.locks l WHERE l.id = _id;
    IF its.crowd THEN
        RETURN stampede.stay(moment, _id, _token, _lease, _pid, _started);
    ELSIF its.token IS DISTINCT FROM _token OR its.ends <= moment OR (its.session AND stampede.gone(its)) THEN
        RETURN false;
    ELSIF its.session THEN
        UPDATE stampede.locks l SET ends = moment + _lease, given = _lease WHERE l.id = _id;
    ELSE
        UPDATE stampede.locks l
        SET ends = moment + _lease, given = _lease, pid = _pid, started = _started,
            server = CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END
        WHERE l.id = _id;
    END IF;
    RETURN true;
END $$;

-- Nothing stands and falls with this connection any more: it is gone, and its process lives.
CREATE FUNCTION stampede.unbind(_pid int, _started float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stampede.locks l SET pid = NULL, started = NULL
    WHERE l.pid = _pid AND l.started = _started AND NOT l.session;
    UPDATE stampede.inside i SET pid = NULL, started = NULL
    WHERE i.pid = _pid AND i.started = _started AND NOT i.session;
    UPDATE stampede.leases l SET pid = NULL, started = NULL WHERE l.pid = _pid AND l.started = _started;
    UPDATE stampede.waiting w SET pid = NULL, started = NULL, asked = stampede.clock()
    WHERE w.pid = _pid AND w.started = _started;
END $$;

-- Give the lock back, or the turn, or the place in the queue, and record how it was held. stood: it was ours.
CREATE FUNCTION stampede.release(
    _id bytea, _token bytea, _call bytea, _problem text, _exception bytea, _message bytea, _traceback bytea,
    OUT stood boolean, OUT told bytea, OUT homes text[]
) LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
    moment float8 := stampede.alone_with(_id);
BEGIN
    SELECT * INTO its FROM stampede.locks l WHERE l.id = _id;
    IF its.crowd THEN
        SELECT f.* INTO stood, told, homes
        FROM stampede.leave(its, moment, _token, _call, _problem, _exception, _message, _traceback) f;
        RETURN;
    END IF;
    stood := false;
    IF its.token = _token THEN
        stood := its.ends > moment AND NOT (its.session AND stampede.gone(its));
        PERFORM stampede.note(
            its, CASE WHEN stood THEN moment ELSE least(its.ends, moment) END,
            CASE WHEN stood THEN _problem WHEN its.ends <= moment THEN 'expired' ELSE 'disconnected' END,
            _call, _exception, _message, _traceback
        );
    ELSIF its.token IS NOT NULL OR its.turn IS DISTINCT FROM _token THEN
        DELETE FROM stampede.waiting w WHERE w.id = _id AND w.token = _token;
        stood := EXISTS (
            SELECT FROM (
                SELECT r.call, r.problem FROM stampede.released r WHERE r.id = _id ORDER BY r.number DESC LIMIT 8
            ) r WHERE r.call = _call AND r.problem IN ('', 'failed')
        );
        IF stood AND its.turn_ends > moment THEN  -- this very call, sent again: perhaps nobody was told
            told := its.turn;
            homes := array_remove(ARRAY[its.turn_home], '');
        END IF;
        RETURN;
    END IF;
    SELECT f.told, f.homes INTO told, homes FROM stampede.set_free(its) f;
END $$;

-- Whether there is still something to wait for: this token has the lock, or the turn; or, of one in the queue
-- (`_mine`), its own turn is yet to come, whoever has the lock meanwhile. For how long it stands, and how many are
-- before that one. Who waits without a place is told where its process lives.
CREATE FUNCTION stampede.standing(
    _id bytea, _token bytea, _mine bytea, _home text, OUT stands boolean, OUT rest float8, OUT ahead int
) LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
    moment float8 := stampede.clock();
    holder bytea;
    place bigint;
BEGIN
    SELECT * INTO its FROM stampede.locks l WHERE l.id = _id;
    IF its.crowd THEN
        SELECT a.* INTO stands, rest, ahead FROM stampede.awaited(its, moment, _token, _mine, _home) a;
        RETURN;
    ELSIF its.token IS NOT NULL THEN
        rest := its.ends - moment;
        holder := CASE WHEN rest > 0 AND NOT stampede.gone(its) THEN its.token END;
    ELSIF its.turn_ends > moment THEN
        rest := its.turn_ends - moment;
        holder := its.turn;
    END IF;
    stands := false;
    ahead := 0;
    IF holder IS NULL THEN
        RETURN;
    ELSIF _mine IS NOT NULL THEN
        SELECT w.arrival INTO place FROM stampede.waiting w WHERE w.id = _id AND w.token = _mine;
        stands := place IS NOT NULL;
        ahead := stampede.before(_id, place);
    ELSIF holder <> _token OR _home = '' OR _home = ANY (its.homes) THEN
        stands := holder = _token;
    ELSE
        PERFORM stampede.alone_with(_id);
        UPDATE stampede.locks l SET homes = array_append(l.homes, _home)
        WHERE l.id = _id AND NOT _home = ANY (l.homes) AND _token IN (l.token, l.turn);
        stands := EXISTS (SELECT FROM stampede.locks l WHERE l.id = _id AND _token IN (l.token, l.turn));
    END IF;
END $$;

-- From now on the lock stands and falls with this connection. false: it is lost.
CREATE FUNCTION stampede.bind(_id bytea, _token bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM stampede.alone_with(_id);
    UPDATE stampede.locks l
    SET pid = pg_backend_pid(), session = true, server = stampede.begin_run(), started = (
        SELECT date_part('epoch', a.backend_start) FROM pg_stat_activity a WHERE a.pid = pg_backend_pid()
    )
    WHERE l.id = _id AND l.token = _token AND l.ends > stampede.clock();
    IF FOUND THEN
        RETURN true;
    END IF;
    UPDATE stampede.inside i
    SET session = true, pid = pg_backend_pid(), server = stampede.begin_run(), started = (
        SELECT date_part('epoch', a.backend_start) FROM pg_stat_activity a WHERE a.pid = pg_backend_pid()
    )
    WHERE i.id = _id AND i.token = _token AND i.ends > stampede.clock();
    RETURN FOUND;
END $$;

-- Forget some of what is older than so many seconds, or than the last so many rows. It looks at the oldest alone.
CREATE FUNCTION stampede.prune(_age float8, _rows bigint, _most int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    first bigint;
    since timestamptz;
    last bigint := (SELECT r.number FROM stampede.released r ORDER BY r.number DESC LIMIT 1);
    count bigint;
BEGIN
    SELECT r.number, r.released INTO first, since FROM stampede.released r ORDER BY r.number LIMIT 1;
    IF first IS NULL OR (first > last - _rows AND date_part('epoch', clock_timestamp() - since) <= _age) THEN
        RETURN 0;
    END IF;
    DELETE FROM stampede.released d WHERE d.number = ANY (ARRAY(
        SELECT r.number FROM stampede.released r
        WHERE r.number < first + 100
          AND (r.number <= last - _rows OR date_part('epoch', clock_timestamp() - r.released) > _age)
        ORDER BY r.number LIMIT _most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS count = ROW_COUNT;
    RETURN count;
END $$;

-- Abandon a lease whose computation has failed, and record that.
CREATE FUNCTION stampede.fail(
    _id bytea, _lock bigint, _token bytea, _verdict text, _told float8, _rest float8, _why text,
    _host text, _process int, _program text, _exception bytea, _message bytea, _age float8, _rows bigint,
    OUT done bool, OUT homes text[]
) LANGUAGE plpgsql AS $$
DECLARE
    moment float8 := stampede.alone(_lock);
    its stampede.leases;
BEGIN
    SELECT * INTO its FROM stampede.leases l WHERE l.id = _id;
    SELECT a.done, a.homes INTO done, homes
    FROM stampede.abandon(_id, _lock, _token, _verdict, _told, _rest, _why) a;
    IF done THEN
        INSERT INTO stampede.released (
            kind, id, name, host, process, program, taken, released, problem, exception, message
        ) VALUES (
            'computation', _id, its.name, _host, _process, _program, to_timestamp(its.taken), to_timestamp(moment),
            'failed', stampede.readable(_exception), stampede.readable(_message)
        );
        PERFORM stampede.prune(_age, _rows, 4);
    END IF;
END $$;

-- Record that whoever computed didn't come to an end: he was killed, or frozen, or is late.
CREATE FUNCTION stampede.note_loss(its stampede.leases, _released float8) RETURNS void LANGUAGE sql AS $$
    INSERT INTO stampede.released (kind, id, name, host, process, taken, released, problem)
    VALUES (
        'computation', its.id, its.name, substring(its.holder FROM '^(.*):'), substring(its.holder FROM ':(\d+)$')::int,
        to_timestamp(its.taken), to_timestamp(least(its.ends, _released)),
        CASE WHEN its.ends <= _released THEN 'expired' ELSE 'disconnected' END
    )
$$;

-- Record and drop some of the locks whose holders are gone, and that nobody waits for. Answers how many.
CREATE FUNCTION stampede.reap(_most int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    each stampede.locks;
    its stampede.locks;
    count int := 0;
BEGIN
    DELETE FROM stampede.waiting d WHERE (d.id, d.token) IN (
        SELECT w.id, w.token FROM stampede.waiting w
        WHERE w.asked < stampede.clock() - 120 AND (w.pid IS NULL OR NOT stampede.lives(w.pid, w.started))
        LIMIT _most
    );
    FOR each IN
        SELECT l.* FROM stampede.locks l
        WHERE CASE WHEN l.crowd THEN NOT EXISTS (
                       SELECT FROM stampede.inside i WHERE i.id = l.id AND i.ends > stampede.clock()
                           AND NOT stampede.gone(stampede.as_lock(i))
                   )
              WHEN l.token IS NULL THEN l.turn_ends < stampede.clock()
              ELSE l.ends <= stampede.clock() OR stampede.gone(l) END
        LIMIT _most
    LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(('x' || encode(substr(each.id, 1, 8), 'hex'))::bit(64)::bigint);
        PERFORM pg_stat_clear_snapshot();  -- who has it now may have connected since we looked
        SELECT * INTO its FROM stampede.locks l WHERE l.id = each.id;
        CONTINUE WHEN its.id IS NULL OR EXISTS (SELECT FROM stampede.waiting w WHERE w.id = each.id);
        IF its.crowd THEN
            PERFORM stampede.settle(its.id, stampede.clock());
            CONTINUE WHEN EXISTS (SELECT FROM stampede.inside i WHERE i.id = its.id);
        ELSIF its.token IS NOT NULL AND its.ends <= stampede.clock() THEN
            PERFORM stampede.note(its, its.ends, 'expired');
        ELSIF its.token IS NOT NULL AND stampede.gone(its) THEN
            PERFORM stampede.note(its, stampede.clock(), 'disconnected');
        ELSIF its.token IS NOT NULL OR its.turn_ends > stampede.clock() THEN
            CONTINUE;
        END IF;
        DELETE FROM stampede.locks l WHERE l.id = its.id;
        count := count + 1;
    END LOOP;
    RETURN count;
END $$;

-- A release that is part of a transaction: it happens with the commit, and never if that doesn't.
CREATE UNLOGGED TABLE stampede.releasing (
    id    bytea NOT NULL,
    token bytea NOT NULL
);

CREATE FUNCTION stampede.releases() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    done record;
BEGIN
    PERFORM pg_stat_clear_snapshot();  -- the user may have looked at who is connected, which he sees until now
    DELETE FROM stampede.releasing r WHERE r.id = NEW.id AND r.token = NEW.token;
    SELECT * INTO done FROM stampede.release(NEW.id, NEW.token, NULL, '', NULL, NULL, NULL) f;
    IF NOT done.stood THEN
        RAISE EXCEPTION 'stampede: the lock ended before this transaction did: somebody else may have been inside'
            USING ERRCODE = 'LOCKS';
    END IF;
    PERFORM pg_notify('stampede_' || home, encode(NEW.id, 'hex') || ' ' || encode(done.told, 'base64'))
    FROM unnest(done.homes) home;
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON stampede.releasing
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION stampede.releases();

-- false: the lock is not held in this database.
CREATE FUNCTION stampede.release_at_commit(_id bytea, _token bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'stampede decides in transactions that are READ COMMITTED' USING ERRCODE = 'invalid_transaction_state';
    ELSIF NOT EXISTS (
        SELECT FROM stampede.holders(_id) l WHERE l.token = _token AND l.ends > stampede.clock()
    ) THEN
        RETURN false;
    END IF;
    INSERT INTO stampede.releasing SELECT _id, _token
    WHERE NOT EXISTS (SELECT FROM stampede.releasing r WHERE r.id = _id AND r.token = _token);  -- it was said twice
    RETURN true;
END $$;

-- For people: who has what, and the record.

CREATE VIEW stampede.held AS
    SELECT stampede.readable(l.name) AS name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken) AS taken,
           to_timestamp(l.ends) AS ends, l.pid AS backend,
           (SELECT count(*) FROM stampede.waiting w WHERE w.id = l.id) AS waiting
    FROM stampede.locks l
    WHERE l.token IS NOT NULL AND l.ends > stampede.clock() AND NOT stampede.gone(l);

-- With what the next one to want a dead one's lock is going to find, and record.
CREATE VIEW stampede.past AS
    SELECT r.number, r.kind, r.name, r.host, r.process, r.program, r.fence, r.taken, r.released, r.problem, r.exception,
           r.message, r.traceback
    FROM stampede.released r
    UNION ALL
    SELECT NULL, 'lock', l.name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken),
           to_timestamp(least(l.ends, stampede.clock())),
           CASE WHEN l.ends <= stampede.clock() THEN 'expired' ELSE 'disconnected' END, NULL, NULL, NULL
    FROM stampede.locks l
    WHERE l.token IS NOT NULL AND (l.ends <= stampede.clock() OR stampede.gone(l));

CREATE VIEW stampede.history AS
    SELECT p.number, p.kind, stampede.readable(p.name) AS name, p.host, p.process, p.program, p.fence, p.taken,
           p.released, p.problem, p.exception, p.message, p.traceback
    FROM stampede.past p;


-- Locks with room for more than one: from the moment somebody comes with another room than for one, until nobody is
-- inside or waits. Then the row in `locks` is there for its turn only, and who is inside stands here.
--
-- The rule is that of stampede/room.py, but a turn is 0.2 s, and who misses it leaves the queue, until he asks again.
-- (No bitmap scans: they don't mark what is dead, and go through all of it the next time. No plan for an empty table:
-- it is kept when that has grown. And no jit: it would compile, each time, what is said to be so dear for that.)

ALTER TABLE stampede.locks ADD COLUMN crowd boolean NOT NULL DEFAULT false;
ALTER TABLE stampede.waiting
    ADD COLUMN room float8 NOT NULL DEFAULT 1,
    ADD COLUMN turn_ends float8;              -- he was called, and a place is kept for him

CREATE TABLE stampede.inside (
    id      bytea NOT NULL,
    token   bytea NOT NULL,
    room    float8 NOT NULL,                  -- how many may be inside together, as far as this one is concerned
    fence   bigint NOT NULL,
    taken   float8 NOT NULL,                  -- this and the others as in `locks`
    given   float8 NOT NULL,
    ends    float8 NOT NULL,
    host    text,
    process int,
    program text,
    pid     int,
    started float8,
    server  text,
    session boolean NOT NULL DEFAULT false,
    PRIMARY KEY (id, token)
) WITH (fillfactor = 70);

-- As if it was the only one inside.
CREATE FUNCTION stampede.as_lock(one stampede.inside) RETURNS stampede.locks LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
BEGIN
    SELECT * INTO its FROM stampede.locks l WHERE l.id = one.id;
    its.token := one.token;
    its.fence := one.fence;
    its.taken := one.taken;
    its.given := one.given;
    its.ends := one.ends;
    its.host := one.host;
    its.process := one.process;
    its.program := one.program;
    its.pid := one.pid;
    its.started := one.started;
    its.server := one.server;
    its.session := one.session;
    RETURN its;
END $$;

-- Who has this lock, or any: a row for each.
CREATE FUNCTION stampede.holders(_id bytea DEFAULT NULL) RETURNS SETOF stampede.locks LANGUAGE plpgsql AS $$
BEGIN
    IF _id IS NULL THEN
        RETURN QUERY SELECT l.* FROM stampede.locks l WHERE l.token IS NOT NULL;
        RETURN QUERY SELECT a.* FROM stampede.inside i, LATERAL stampede.as_lock(i) a;
    ELSE
        RETURN QUERY SELECT l.* FROM stampede.locks l WHERE l.id = _id AND l.token IS NOT NULL;
        RETURN QUERY SELECT a.* FROM stampede.inside i, LATERAL stampede.as_lock(i) a WHERE i.id = _id;
    END IF;
END $$;

-- Those whose time is over, or whose connection is gone, have left; those who missed their turn don't wait.
CREATE FUNCTION stampede.settle(_id bytea, moment float8) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    one stampede.inside;
    its stampede.locks;
BEGIN
    UPDATE stampede.inside i SET ends = moment + i.given WHERE i.id = _id AND i.ends > moment + i.given;
    FOR one IN SELECT * FROM stampede.inside i WHERE i.id = _id LOOP
        its := stampede.as_lock(one);
        IF its.ends <= moment THEN
            PERFORM stampede.note(its, its.ends, 'expired');
        ELSIF stampede.gone(its) THEN
            PERFORM stampede.note(its, moment, 'disconnected');
        ELSE
            CONTINUE;
        END IF;
        DELETE FROM stampede.inside i WHERE i.id = _id AND i.token = one.token;
    END LOOP;
    DELETE FROM stampede.waiting w WHERE w.id = _id AND (
        NOT w.turn_ends BETWEEN moment AND moment + 0.2
        OR CASE WHEN w.pid IS NULL THEN w.asked <= moment - 120 ELSE NOT stampede.lives(w.pid, w.started) END
    );
END $$;

-- Call as many of the first as may be inside together with those who are, or were called. Answers where they are.
CREATE FUNCTION stampede.call(_id bytea, moment float8) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    each stampede.waiting;
    there bigint;
    least float8;
    homes text[] := '{}';
BEGIN
    SELECT count(*), coalesce(min(r.room), 'infinity') INTO there, least FROM (
        SELECT i.room FROM stampede.inside i WHERE i.id = _id
        UNION ALL SELECT w.room FROM stampede.waiting w WHERE w.id = _id AND w.turn_ends IS NOT NULL
    ) r;
    FOR each IN
        SELECT * FROM stampede.waiting w WHERE w.id = _id AND w.turn_ends IS NULL ORDER BY w.arrival
    LOOP
        there := there + 1;
        least := least(least, each.room);
        EXIT WHEN there > least;
        UPDATE stampede.waiting w SET turn_ends = moment + 0.2 WHERE w.id = _id AND w.token = each.token;
        homes := array_append(homes, each.home);
    END LOOP;
    RETURN array_remove(homes, '');
END $$;

-- `acquire`, whose turn it has.
CREATE FUNCTION stampede.enter(
    its stampede.locks, moment float8,
    _id bytea, _name bytea, _token bytea, _lease float8, _host text, _process int, _program text,
    _pid int, _started float8, _waits boolean, _home text, _arrival bigint, _age float8, _rows bigint, _room float8,
    OUT granted boolean, OUT number bigint, OUT holder bytea, OUT rest float8, OUT place bigint, OUT ahead int,
    OUT told bytea, OUT homes text[]
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    own stampede.waiting;
    there bigint;
    least float8;
    _server text := CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END;
BEGIN
    told := '';
    IF its.id IS NULL THEN
        INSERT INTO stampede.locks (id, name, fence, crowd) VALUES (_id, _name, 0, true);
    ELSIF NOT its.crowd THEN  -- its holder, or the one whose turn it is, is one of many now
        IF its.token IS NOT NULL THEN
            INSERT INTO stampede.inside VALUES (
                _id, its.token, 1, its.fence, its.taken, its.given, its.ends, its.host, its.process, its.program,
                its.pid, its.started, its.server, its.session
            );
        ELSIF its.turn_ends > moment THEN
            INSERT INTO stampede.waiting (id, arrival, token, home, asked, turn_ends) VALUES (
                _id, coalesce((SELECT min(w.arrival) FROM stampede.waiting w WHERE w.id = _id), moment * 1000000) - 1,
                its.turn, its.turn_home, moment, its.turn_ends
            ) ON CONFLICT DO NOTHING;
        END IF;
        UPDATE stampede.locks l
        SET crowd = true, token = NULL, pid = NULL, session = false, turn = NULL, turn_home = NULL, turn_ends = NULL
        WHERE l.id = _id;
    END IF;
    PERFORM stampede.settle(_id, moment);
    UPDATE stampede.inside i
    SET ends = moment + _lease, given = _lease, pid = _pid, started = _started, server = _server
    WHERE i.id = _id AND i.token = _token RETURNING i.fence INTO number;
    granted := FOUND;  -- the reply was lost
    IF _waits AND _arrival IS NOT NULL AND NOT granted THEN  -- he may have missed his turn
        INSERT INTO stampede.waiting VALUES (_id, _arrival, _token, _home, _pid, _started, moment, _room)
        ON CONFLICT DO NOTHING;
    END IF;
    homes := stampede.call(_id, moment);
    IF granted THEN
        RETURN;
    END IF;
    SELECT * INTO own FROM stampede.waiting w WHERE w.id = _id AND w.token = _token;
    IF own.token IS NULL AND NOT EXISTS (SELECT FROM stampede.waiting w WHERE w.id = _id) THEN
        SELECT count(*) + 1, least(_room, min(i.room)) INTO there, least FROM stampede.inside i WHERE i.id = _id;
        granted := there <= least;
    END IF;
    IF granted OR own.turn_ends IS NOT NULL THEN
        granted := true;
        number := nextval('stampede.fences');
        INSERT INTO stampede.inside VALUES (
            _id, _token, coalesce(own.room, _room), number, moment, _lease, moment + _lease, _host, _process, _program,
            _pid, _started, _server
        );
        DELETE FROM stampede.waiting w WHERE w.id = _id AND w.token = _token;
        PERFORM stampede.prune(_age, _rows, 4);  -- its release writes one
        RETURN;
    END IF;
    IF _waits THEN
        place := coalesce(_arrival, greatest(
            floor(moment * 1000000)::bigint,
            (SELECT w.arrival + 1 FROM stampede.waiting w WHERE w.id = _id ORDER BY w.arrival DESC LIMIT 1)
        ));
        INSERT INTO stampede.waiting AS w VALUES (_id, place, _token, _home, _pid, _started, moment, _room)
        ON CONFLICT (id, token) DO UPDATE
        SET home = excluded.home, pid = excluded.pid, started = excluded.started, asked = excluded.asked
        RETURNING w.arrival INTO place;
        ahead := stampede.before(_id, place);
    END IF;
    SELECT i.token, i.ends - moment INTO holder, rest FROM stampede.inside i WHERE i.id = _id ORDER BY i.ends LIMIT 1;
    IF holder IS NULL THEN
        SELECT w.token, w.turn_ends - moment INTO holder, rest
        FROM stampede.waiting w WHERE w.id = _id AND w.turn_ends IS NOT NULL ORDER BY w.turn_ends LIMIT 1;
    END IF;
END $$;

-- `release`, whose turn it has.
CREATE FUNCTION stampede.leave(
    its stampede.locks, moment float8,
    _token bytea, _call bytea, _problem text, _exception bytea, _message bytea, _traceback bytea,
    OUT stood boolean, OUT told bytea, OUT homes text[]
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    one stampede.inside;
BEGIN
    told := '';
    PERFORM stampede.settle(its.id, moment);
    DELETE FROM stampede.inside i WHERE i.id = its.id AND i.token = _token RETURNING * INTO one;
    stood := FOUND;
    IF stood THEN
        PERFORM stampede.note(stampede.as_lock(one), moment, _problem, _call, _exception, _message, _traceback);
    ELSE
        DELETE FROM stampede.waiting w WHERE w.id = its.id AND w.token = _token;
        stood := EXISTS (
            SELECT FROM (
                SELECT r.call, r.problem FROM stampede.released r WHERE r.id = its.id ORDER BY r.number DESC LIMIT 8
            ) r WHERE r.call = _call AND r.problem IN ('', 'failed')
        );
    END IF;
    homes := stampede.call(its.id, moment) || its.homes;
    IF NOT EXISTS (SELECT FROM stampede.inside i WHERE i.id = its.id)
            AND NOT EXISTS (SELECT FROM stampede.waiting w WHERE w.id = its.id) THEN
        DELETE FROM stampede.locks l WHERE l.id = its.id;
    ELSIF its.homes <> '{}' THEN
        UPDATE stampede.locks l SET homes = '{}' WHERE l.id = its.id;
    END IF;
END $$;

-- `renew`, whose turn it has.
CREATE FUNCTION stampede.stay(moment float8, _id bytea, _token bytea, _lease float8, _pid int, _started float8)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stampede.inside i
    SET ends = moment + _lease, given = _lease, pid = CASE WHEN i.session THEN i.pid ELSE _pid END,
        started = CASE WHEN i.session THEN i.started ELSE _started END,
        server = CASE WHEN i.session THEN i.server WHEN _pid IS NOT NULL THEN stampede.begin_run() END
    WHERE i.id = _id AND i.token = _token AND i.ends > moment
        AND NOT (i.session AND stampede.gone(stampede.as_lock(i)));
    RETURN FOUND;
END $$;

-- `standing`: also when somebody has left without a word, the first who looks is to ask.
CREATE FUNCTION stampede.awaited(
    its stampede.locks, moment float8, _token bytea, _mine bytea, _home text,
    OUT stands boolean, OUT rest float8, OUT ahead int
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    own stampede.waiting;
BEGIN
    ahead := 0;
    rest := (SELECT min(i.ends) - moment FROM stampede.inside i WHERE i.id = its.id);
    stands := coalesce(rest, 1) > 0
        AND NOT EXISTS (
            SELECT FROM stampede.inside i WHERE i.id = its.id AND i.pid IS NOT NULL
                AND stampede.gone(stampede.as_lock(i))
        )
        AND NOT EXISTS (SELECT FROM stampede.waiting w WHERE w.id = its.id AND w.turn_ends <= moment)
        AND NOT EXISTS (
            SELECT FROM (
                SELECT w.pid, w.started FROM stampede.waiting w WHERE w.id = its.id ORDER BY w.arrival LIMIT 1
            ) first WHERE NOT stampede.lives(first.pid, first.started)
        );
    rest := coalesce(rest, 0.2);
    IF NOT stands THEN
        RETURN;
    ELSIF _mine IS NOT NULL THEN
        SELECT * INTO own FROM stampede.waiting w WHERE w.id = its.id AND w.token = _mine;
        stands := own.token IS NOT NULL AND own.turn_ends IS NULL;
        ahead := stampede.before(its.id, own.arrival);
        RETURN;
    ELSIF _home <> '' AND NOT _home = ANY (its.homes) THEN
        PERFORM stampede.alone_with(its.id);
        UPDATE stampede.locks l SET homes = array_append(l.homes, _home)
        WHERE l.id = its.id AND NOT _home = ANY (l.homes);
    END IF;
    stands := EXISTS (SELECT FROM stampede.inside i WHERE i.id = its.id AND i.token = _token)
        OR EXISTS (SELECT FROM stampede.waiting w WHERE w.id = its.id AND w.token = _token AND w.turn_ends IS NOT NULL);
END $$;

-- For people, as in locks.sql.

CREATE OR REPLACE VIEW stampede.held AS
    SELECT stampede.readable(l.name) AS name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken) AS taken,
           to_timestamp(l.ends) AS ends, l.pid AS backend,
           (SELECT count(*) FROM stampede.waiting w WHERE w.id = l.id) AS waiting
    FROM stampede.holders() l
    WHERE l.ends > stampede.clock() AND NOT stampede.gone(l);

CREATE OR REPLACE VIEW stampede.past AS
    SELECT r.number, r.kind, r.name, r.host, r.process, r.program, r.fence, r.taken, r.released, r.problem, r.exception,
           r.message, r.traceback
    FROM stampede.released r
    UNION ALL
    SELECT NULL, 'lock', l.name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken),
           to_timestamp(least(l.ends, stampede.clock())),
           CASE WHEN l.ends <= stampede.clock() THEN 'expired' ELSE 'disconnected' END, NULL, NULL, NULL
    FROM stampede.holders() l
    WHERE l.ends <= stampede.clock() OR stampede.gone(l);


-- Limits: what window.py of stampede decides, which says why; tests hold one to the other. All times are microseconds by
-- the clock of this server. What was started is forgotten in a crash, unless the tables are durable.

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

-- It alone, as it is now: window.py's `_today`.
CREATE FUNCTION stampede.limit_today(_id bytea, _name bytea, _span bigint) RETURNS stampede.limits
LANGUAGE plpgsql AS $$
DECLARE
    its stampede.limits;
    now bigint := floor(stampede.alone_with(_id) * 1000000)::bigint;
    back bigint;
BEGIN
    SELECT * INTO its FROM stampede.limits l WHERE l.id = _id;
    IF its.id IS NULL THEN
        its := ROW(_id, _name, 0, 0, 0, 0, 0, 0, '{}'::bigint[], '{}'::bigint[], '{}'::bigint[], 0)::stampede.limits;
    END IF;
    back := its.seen - now;
    IF back > 1000000 THEN
        its.until := its.until - back;
        its.rest := its.rest - back;
        its.firsts := ARRAY(SELECT each - back FROM unnest(its.firsts) WITH ORDINALITY AS l(each, place) ORDER BY place);
        its.lasts := ARRAY(SELECT each - back FROM unnest(its.lasts) WITH ORDINALITY AS l(each, place) ORDER BY place);
    ELSIF back > 0 THEN
        now := its.seen;
    END IF;
    IF _span >= its.long OR now >= its.until THEN
        its.long := _span;
        its.until := now + _span;
    END IF;
    its.seen := now;
    WHILE its.lasts[1] + its.long <= now LOOP
        its.firsts := its.firsts[2:];
        its.lasts := its.lasts[2:];
        its.costs := its.costs[2:];
    END LOOP;
    RETURN its;
END $$;

CREATE FUNCTION stampede.limit_keep(its stampede.limits) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    its.ends := greatest(its.lasts[cardinality(its.lasts)], its.rest, its.seen) + its.long;
    UPDATE stampede.limits l
    SET most = its.most, per = its.per, long = its.long, until = its.until, rest = its.rest, seen = its.seen,
        firsts = its.firsts, lasts = its.lasts, costs = its.costs, ends = its.ends
    WHERE l.id = its.id;
    IF NOT FOUND THEN
        INSERT INTO stampede.limits SELECT its.*;
        IF random() < 0.01 THEN
            DELETE FROM stampede.limits l WHERE l.id IN (
                SELECT o.id FROM stampede.limits o WHERE o.ends < its.seen ORDER BY o.id FOR UPDATE SKIP LOCKED
            );
        END IF;
    END IF;
END $$;

-- Microseconds until a start may be made; and when that is, if it is booked, as they are no more than `_ahead`.
CREATE FUNCTION stampede.limit_take(
    _id bytea, _name bytea, _most bigint, _per bigint, _span bigint, _width bigint, _cost bigint, _ahead bigint,
    OUT delay bigint, OUT moment bigint
) LANGUAGE plpgsql AS $$
DECLARE
    its stampede.limits := stampede.limit_today(_id, _name, _span);
    length int := cardinality(its.firsts);
    at bigint := greatest(its.seen, its.rest);
    low int := 1;
    total bigint := 0;
    place int := length;
BEGIN
    FOR high IN 1 .. length LOOP
        total := total + its.costs[high];
        WHILE total - its.costs[low] + _cost > _most LOOP
            total := total - its.costs[low];
            low := low + 1;
        END LOOP;
        IF total + _cost > _most AND its.firsts[high] - _span < at AND at < its.lasts[low] + _span THEN
            at := its.lasts[low] + _span;
        END IF;
    END LOOP;
    delay := at - its.seen;
    IF delay > _ahead THEN
        IF EXISTS (SELECT FROM stampede.limits l WHERE l.id = _id AND l.seen > its.seen) THEN
            PERFORM stampede.limit_keep(its);  -- the clock was set back, as is to be seen once
        END IF;
        RETURN;
    END IF;
    WHILE place > 0 AND its.firsts[place] > at LOOP
        place := place - 1;
    END LOOP;
    IF place > 0 AND at <= greatest(its.lasts[place], its.firsts[place] + _width) THEN
        its.lasts[place] := greatest(its.lasts[place], at);
        its.costs[place] := its.costs[place] + _cost;
    ELSIF place < length AND its.lasts[place + 1] - at <= _width THEN
        its.firsts[place + 1] := at;
        its.costs[place + 1] := its.costs[place + 1] + _cost;
    ELSE
        IF length >= 512 THEN
            IF place = 0 OR its.lasts[2] + _span > its.seen THEN
                RETURN;
            END IF;
            its.firsts := its.firsts[1:1] || its.firsts[3:];
            its.lasts := its.lasts[2:];
            its.costs := (its.costs[1] + its.costs[2]) || its.costs[3:];
            place := place - 1;
        END IF;
        its.firsts := its.firsts[:place] || at || its.firsts[place + 1:];
        its.lasts := its.lasts[:place] || at || its.lasts[place + 1:];
        its.costs := its.costs[:place] || _cost || its.costs[place + 1:];
    END IF;
    its.most := _most;
    its.per := _per;
    PERFORM stampede.limit_keep(its);
    moment := at;
END $$;

-- A start that was booked isn't made.
CREATE FUNCTION stampede.limit_back(_id bytea, _cost bigint, _at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    its stampede.limits;
BEGIN
    PERFORM stampede.alone_with(_id);
    SELECT * INTO its FROM stampede.limits l WHERE l.id = _id;
    FOR each IN 1 .. coalesce(cardinality(its.firsts), 0) LOOP
        IF its.firsts[each] <= _at AND _at <= its.lasts[each] AND its.costs[each] >= _cost THEN
            its.costs[each] := its.costs[each] - _cost;
            IF its.costs[each] = 0 THEN
                its.firsts := its.firsts[:each - 1] || its.firsts[each + 1:];
                its.lasts := its.lasts[:each - 1] || its.lasts[each + 1:];
                its.costs := its.costs[:each - 1] || its.costs[each + 1:];
            END IF;
            PERFORM stampede.limit_keep(its);
            RETURN;
        END IF;
    END LOOP;
END $$;

-- No start for so many microseconds.
CREATE FUNCTION stampede.limit_rest(
    _id bytea, _name bytea, _most bigint, _per bigint, _span bigint, _length bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    its stampede.limits := stampede.limit_today(_id, _name, _span);
BEGIN
    its.most := _most;
    its.per := _per;
    its.rest := greatest(its.rest, its.seen + _length);
    PERFORM stampede.limit_keep(its);
END $$;

-- All of them, or one, as they were when they were asked last; and what time it is.
CREATE FUNCTION stampede.limits_now(
    _id bytea, OUT name bytea, OUT now bigint, OUT most bigint, OUT per bigint, OUT long bigint, OUT until bigint,
    OUT rest bigint, OUT seen bigint, OUT firsts text, OUT lasts text, OUT costs text
) RETURNS SETOF record LANGUAGE sql AS $$
    SELECT l.name, floor(stampede.clock() * 1000000)::bigint, l.most, l.per, l.long, l.until, l.rest, l.seen,
           l.firsts::text, l.lasts::text, l.costs::text
    FROM stampede.limits l
    WHERE _id IS NULL OR l.id = _id
$$;
