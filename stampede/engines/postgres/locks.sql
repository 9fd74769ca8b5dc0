-- Locks, and the record of how each was held.
--
-- These functions decide as stampede/model/lock_queue.py does, which says why, with one difference: a waiter that misses its
-- turn leaves the queue, and comes back to its place when it asks again. Each function that changes a lock takes an
-- advisory lock for its id first, and reads in later statements, which see all that was committed before.
--
-- Functions that read places and the queue run without bitmap scans, which do not mark dead rows and so read all of
-- them again the next time; without sequential scans, since a plan made for an empty table would stay when the table
-- has grown; and without jit, which would compile anew in each call because disabled scans make the plan look
-- expensive.

-- (Functions that every lock calls are plpgsql, which keeps plans. A function in sql is planned in each transaction.)
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

-- Return whether the holder's connection is gone, and not because the server was restarted.
CREATE FUNCTION stampede.gone(its stampede.locks) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN its.pid IS NOT NULL AND NOT stampede.lives(its.pid, its.started)
        AND its.server IS NOT DISTINCT FROM stampede.run();
END $$;

-- Return whether the holder's connection has been gone for a second. A load balancer may have reset the connection of a
-- healthy holder, which has this second to say that it lives (`unbind`, `renew`). The server does not notify anyone
-- when a connection ends, so the second begins when this function is first called.
CREATE FUNCTION stampede.dead(its stampede.locks) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    noticed float8;
BEGIN
    IF NOT stampede.gone(its) THEN
        RETURN false;
    END IF;
    SELECT m.since INTO noticed FROM stampede.missed m WHERE m.pid = its.pid AND m.started = its.started;
    -- (Two transactions that both wait to write this could wait for each other, so the second one does not write.)
    IF noticed IS NULL AND pg_try_advisory_xact_lock(8319104481669375079) THEN
        INSERT INTO stampede.missed VALUES (its.pid, its.started, stampede.clock()) ON CONFLICT DO NOTHING;
    END IF;
    RETURN coalesce(noticed <= stampede.clock() - 1, false);
END $$;

-- Take the advisory lock of an id until the end of the transaction, and return the time after that.
CREATE FUNCTION stampede.alone_with(_id bytea) RETURNS float8 LANGUAGE sql AS $$
    SELECT stampede.alone(('x' || encode(substr(_id, 1, 8), 'hex'))::bit(64)::bigint)
$$;

-- Return UTF-8 as text; escaped, if this server's encoding lacks a character.
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
    WHERE substr(its.name, 1, 10) <> 'computing\000'::bytea;  -- the lease of a key whose value another engine stores
END $$;

-- Return how many wait before this place in the queue, at most 300: from then on, each waiter looks every 30 s.
CREATE FUNCTION stampede.before(_id bytea, _arrival bigint) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT count(*) FROM (
        SELECT FROM stampede.waiting w WHERE w.id = _id AND w.arrival < _arrival LIMIT 300
    ) others);
END $$;

-- End the places that have expired or whose holder is dead, and give places to the first waiters of the queue while
-- they fit. `there`: how many places there are then; `room`: the least of their rooms; `queued`: a place is reserved,
-- or a waiter is in the queue (only set if there is room); `tokens` and `homes`: those waiters, and their processes.
CREATE FUNCTION stampede.advance(
    _id bytea, moment float8,
    OUT there int, OUT room float8, OUT queued boolean, OUT tokens bytea[], OUT homes text[]
) LANGUAGE plpgsql AS $$
DECLARE
    its stampede.locks;
    first stampede.waiting;
BEGIN
    there := 0;
    room := 'infinity';
    queued := false;
    FOR its IN SELECT * FROM stampede.locks l WHERE l.id = _id LOOP
        IF its.ends > moment + its.given THEN  -- the clock was set back: cap the rest of the lease at the whole lease
            its.ends := moment + its.given;
            UPDATE stampede.locks l SET ends = its.ends WHERE l.id = _id AND l.token = its.token;
        END IF;
        IF its.ends > moment AND NOT stampede.dead(its) THEN
            there := there + 1;
            room := least(room, its.room);
            queued := queued OR its.fence IS NULL;
            CONTINUE;
        END IF;
        IF its.fence IS NOT NULL THEN
            PERFORM stampede.note(
                its, least(its.ends, moment), CASE WHEN its.ends <= moment THEN 'expired' ELSE 'disconnected' END
            );
        END IF;
        DELETE FROM stampede.locks l WHERE l.id = _id AND l.token = its.token;
    END LOOP;
    IF there >= room THEN  -- no waiter fits, so the queue need not be read: with many waiters, most calls end here
        RETURN;
    END IF;
    FOR first IN SELECT * FROM stampede.waiting w WHERE w.id = _id ORDER BY w.arrival LOOP
        -- Without a connection, a dead waiter is not recognized, and costs a turn, unless it last asked long ago.
        IF (CASE WHEN first.pid IS NULL THEN first.asked > moment - 120
                 ELSE stampede.lives(first.pid, first.started) END) THEN
            queued := true;
            EXIT WHEN there >= least(room, first.room);
            INSERT INTO stampede.locks (id, token, room, given, ends)
            VALUES (_id, first.token, first.room, 0.2, moment + 0.2);
            there := there + 1;
            room := least(room, first.room);
            tokens := array_append(tokens, first.token);
            homes := array_append(homes, first.home);
        END IF;
        DELETE FROM stampede.waiting w WHERE w.id = _id AND w.token = first.token;
    END LOOP;
END $$;

-- Take a place in the lock. If that is refused, return the `holder` in the way and the `rest` of its lease in seconds,
-- and take a place in the queue (`_arrival`: the place of an earlier call). Each call that takes the lock also removes
-- some records that are older than `_age` seconds, or than the last `_rows`.
CREATE FUNCTION stampede.acquire(
    _id bytea, _name bytea, _token bytea, _lease float8, _host text, _process int, _program text,
    _pid int, _started float8, _waits boolean, _home text, _arrival bigint, _age float8, _rows bigint, _room float8,
    OUT granted boolean, OUT number bigint, OUT holder bytea, OUT rest float8, OUT place bigint, OUT ahead int,
    OUT tokens bytea[], OUT homes text[]
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    moment float8 := stampede.alone_with(_id);
    own stampede.locks;
    now record;
BEGIN
    SELECT * INTO own FROM stampede.locks l WHERE l.id = _id AND l.token = _token;
    -- Its own row: its turn has come, or the reply to an earlier call was lost.
    granted := own.token IS NOT NULL AND (own.fence IS NULL OR own.ends > moment);
    IF NOT granted THEN
        own := NULL;
        IF _waits AND _arrival IS NOT NULL THEN  -- it may have missed its turn
            INSERT INTO stampede.waiting VALUES (_id, _arrival, _token, _home, _pid, _started, moment, _room)
            ON CONFLICT DO NOTHING;
        END IF;
        SELECT * INTO now FROM stampede.advance(_id, moment);
        tokens := now.tokens;
        homes := now.homes;
        granted := coalesce(_token = ANY (tokens), false) OR (NOT now.queued AND now.there < least(now.room, _room));
    END IF;
    IF granted THEN
        number := coalesce(own.fence, nextval('stampede.fences'));
        INSERT INTO stampede.locks AS l (
            id, token, name, room, fence, taken, given, ends, host, process, program, pid, started, server
        ) VALUES (
            _id, _token, _name, _room, number, moment, _lease, moment + _lease, _host, _process, _program, _pid,
            _started, CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END
        )
        ON CONFLICT (id, token) DO UPDATE
        SET name = excluded.name, fence = excluded.fence, taken = coalesce(l.taken, excluded.taken),
            given = excluded.given, ends = excluded.ends, host = excluded.host, process = excluded.process,
            program = excluded.program, pid = excluded.pid, started = excluded.started, server = excluded.server;
        PERFORM stampede.prune(_age, _rows, 4);  -- more than the one record that its release writes
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
    SELECT l.token, l.ends - moment INTO holder, rest
    FROM stampede.locks l WHERE l.id = _id ORDER BY l.fence IS NULL, l.ends LIMIT 1;
END $$;

-- Extend the lock to `_lease` seconds from now, and bind it to this backend. false: it is lost.
CREATE FUNCTION stampede.renew(_id bytea, _token bytea, _lease float8, _pid int, _started float8)
RETURNS boolean LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    moment float8 := stampede.alone_with(_id);
BEGIN
    UPDATE stampede.locks l
    SET ends = moment + _lease, given = _lease, pid = _pid, started = _started,
        server = CASE WHEN _pid IS NOT NULL THEN stampede.begin_run() END
    WHERE l.id = _id AND l.token = _token AND l.fence IS NOT NULL AND l.ends > moment;
    RETURN FOUND;
END $$;

-- Forget a backend that is gone, but whose process lives: its locks, leases and waiters depend on it no more.
CREATE FUNCTION stampede.unbind(_pid int, _started float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stampede.locks l SET pid = NULL, started = NULL WHERE l.pid = _pid AND l.started = _started;
    UPDATE stampede.leases l SET pid = NULL, started = NULL WHERE l.pid = _pid AND l.started = _started;
    UPDATE stampede.waiting w SET pid = NULL, started = NULL, asked = stampede.clock()
    WHERE w.pid = _pid AND w.started = _started;
END $$;

-- Give up the place in the lock or in the queue, and record how the lock was held. `stood`: it was still held.
CREATE FUNCTION stampede.release(
    _id bytea, _token bytea, _call bytea, _problem text, _exception bytea, _message bytea, _traceback bytea,
    OUT stood boolean, OUT tokens bytea[], OUT homes text[]
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    its stampede.locks;
    moment float8 := stampede.alone_with(_id);
BEGIN
    DELETE FROM stampede.locks l WHERE l.id = _id AND l.token = _token RETURNING * INTO its;
    IF its.fence IS NOT NULL THEN
        stood := its.ends > moment;
        PERFORM stampede.note(
            its, CASE WHEN stood THEN moment ELSE least(its.ends, moment) END,
            CASE WHEN stood THEN _problem ELSE 'expired' END,
            _call, _exception, _message, _traceback
        );
    ELSE
        DELETE FROM stampede.waiting w WHERE w.id = _id AND w.token = _token;
        stood := EXISTS (  -- this call was sent again, and the first one released the lock
            SELECT FROM (
                SELECT r.call, r.problem FROM stampede.released r WHERE r.id = _id ORDER BY r.number DESC LIMIT 8
            ) r WHERE r.call = _call AND r.problem IN ('', 'failed')
        );
    END IF;
    SELECT a.tokens, a.homes INTO tokens, homes FROM stampede.advance(_id, moment) a;
    IF its.homes <> '{}' THEN  -- an empty token wakes all waiters of a process
        tokens := array_cat(tokens, array_fill(''::bytea, ARRAY[cardinality(its.homes)]));
        homes := array_cat(homes, its.homes);
    END IF;
END $$;

-- Return in `stands` whether a caller should keep waiting. With `_mine`, a waiter in the queue: its turn has not come,
-- no matter which token holds the lock. Otherwise: `_token` still holds it; the caller's process is noted in `homes`,
-- to be notified. `rest`: for how long; `ahead`: how many wait before it. False if a lease has ended or a holder is
-- dead: then the caller must call `acquire`, which calls the next waiter.
CREATE FUNCTION stampede.standing(
    _id bytea, _token bytea, _mine bytea, _home text, OUT stands boolean, OUT rest float8, OUT ahead int
) LANGUAGE plpgsql SET enable_bitmapscan = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    moment float8 := stampede.clock();
    its stampede.locks;
    awaited stampede.locks;
    place bigint;
    room float8 := 'infinity';
BEGIN
    stands := false;
    ahead := 0;
    FOR its IN SELECT * FROM stampede.locks l WHERE l.id = _id LOOP
        IF its.ends <= moment OR stampede.dead(its) THEN
            RETURN;
        END IF;
        rest := least(rest, its.ends - moment);
        room := least(room, its.room);
        IF its.token = _token THEN
            awaited := its;
        END IF;
    END LOOP;
    IF rest IS NULL THEN
        RETURN;
    ELSIF _mine IS NOT NULL THEN
        SELECT w.arrival INTO place FROM stampede.waiting w WHERE w.id = _id AND w.token = _mine;
        ahead := stampede.before(_id, place);
        stands := place IS NOT NULL AND (room <= 1 OR NOT EXISTS (  -- a dead waiter is first, and others may fit
            SELECT FROM (
                SELECT w.pid, w.started FROM stampede.waiting w WHERE w.id = _id ORDER BY w.arrival LIMIT 1
            ) first WHERE NOT stampede.lives(first.pid, first.started)
        ));
    ELSE
        stands := awaited.token IS NOT NULL;
        IF stands AND _home <> '' AND NOT _home = ANY (awaited.homes) THEN
            PERFORM stampede.alone_with(_id);
            UPDATE stampede.locks l SET homes = array_append(l.homes, _home)
            WHERE l.id = _id AND l.token = _token AND NOT _home = ANY (l.homes);
            stands := EXISTS (SELECT FROM stampede.locks l WHERE l.id = _id AND l.token = _token);
        END IF;
    END IF;
END $$;

-- Remove some records that are older than so many seconds, or than the last so many rows. Only the oldest are read.
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

-- End and record some of the places that have expired or whose holder is dead, in locks without waiters. Return the
-- number of locks.
CREATE FUNCTION stampede.reap(_most int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
    its_id bytea;
    count int := 0;
BEGIN
    DELETE FROM stampede.waiting d WHERE (d.id, d.token) IN (
        SELECT w.id, w.token FROM stampede.waiting w
        WHERE w.asked < stampede.clock() - 120 AND (w.pid IS NULL OR NOT stampede.lives(w.pid, w.started))
        LIMIT _most
    );
    DELETE FROM stampede.missed m WHERE m.since < stampede.clock() - 86400;
    FOR its_id IN
        SELECT l.id FROM stampede.locks l WHERE l.ends <= stampede.clock() OR stampede.dead(l) LIMIT _most
    LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(('x' || encode(substr(its_id, 1, 8), 'hex'))::bit(64)::bigint);
        CONTINUE WHEN EXISTS (SELECT FROM stampede.waiting w WHERE w.id = its_id);
        PERFORM pg_stat_clear_snapshot();  -- a new holder may have connected since the snapshot
        PERFORM stampede.advance(its_id, stampede.clock());
        count := count + 1;
    END LOOP;
    RETURN count;
END $$;

CREATE FUNCTION stampede.releases() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    done record;
BEGIN
    PERFORM pg_stat_clear_snapshot();  -- the transaction may have read pg_stat_activity, and would see that state again
    DELETE FROM stampede.releasing r WHERE r.id = NEW.id AND r.token = NEW.token;
    SELECT * INTO done FROM stampede.release(NEW.id, NEW.token, NULL, '', NULL, NULL, NULL) f;
    IF NOT done.stood THEN
        RAISE EXCEPTION 'stampede: the lock ended before this transaction did: another holder may have been inside'
            USING ERRCODE = 'LOCKS';
    END IF;
    PERFORM pg_notify('stampede_' || called.home, encode(NEW.id, 'hex') || ' ' || encode(called.token, 'base64'))
    FROM unnest(done.tokens, done.homes) AS called (token, home) WHERE called.home <> '';
    RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON stampede.releasing
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION stampede.releases();

-- Release the lock when this transaction commits, and not if it fails. false: the lock is not held in this database.
CREATE FUNCTION stampede.release_at_commit(_id bytea, _token bytea) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'stampede decides in transactions that are READ COMMITTED' USING ERRCODE = 'invalid_transaction_state';
    ELSIF NOT EXISTS (
        SELECT FROM stampede.locks l
        WHERE l.id = _id AND l.token = _token AND l.fence IS NOT NULL AND l.ends > stampede.clock()
    ) THEN
        RETURN false;
    END IF;
    INSERT INTO stampede.releasing SELECT _id, _token
    WHERE NOT EXISTS (SELECT FROM stampede.releasing r WHERE r.id = _id AND r.token = _token);  -- not twice
    RETURN true;
END $$;

-- Views for people: the locks that are held, and the record.

CREATE VIEW stampede.held AS
    SELECT stampede.readable(l.name) AS name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken) AS taken,
           to_timestamp(l.ends) AS ends, l.pid AS backend,
           (SELECT count(*) FROM stampede.waiting w WHERE w.id = l.id) AS waiting
    FROM stampede.locks l
    WHERE l.fence IS NOT NULL AND l.ends > stampede.clock() AND NOT stampede.gone(l);

-- The record, together with the rows that the next caller of each lock is going to write about expired or dead holders.
CREATE VIEW stampede.past AS
    SELECT r.number, r.name, r.host, r.process, r.program, r.fence, r.taken, r.released, r.problem, r.exception,
           r.message, r.traceback
    FROM stampede.released r
    UNION ALL
    SELECT NULL, l.name, l.host, l.process, l.program, l.fence, to_timestamp(l.taken),
           to_timestamp(least(l.ends, stampede.clock())),
           CASE WHEN l.ends <= stampede.clock() THEN 'expired' ELSE 'disconnected' END, NULL, NULL, NULL
    FROM stampede.locks l
    WHERE l.fence IS NOT NULL AND (l.ends <= stampede.clock() OR stampede.gone(l));

CREATE VIEW stampede.history AS
    SELECT p.number, stampede.readable(p.name) AS name, p.host, p.process, p.program, p.fence, p.taken,
           p.released, p.problem, p.exception, p.message, p.traceback
    FROM stampede.past p;
