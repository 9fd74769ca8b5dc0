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

-- Connections of holders that are gone, and when that was first noticed.
CREATE UNLOGGED TABLE stampede.missed (
    pid     int NOT NULL,
    started float8 NOT NULL,
    since   float8 NOT NULL,
    PRIMARY KEY (pid, started)
);

-- The holder's connection has been gone for a second. A load balancer may have reset the connection of a holder that is
-- well: the holder has this second to say so (`unbind`, `renew`). The server tells nobody when a connection ends, so the
-- second begins when somebody first asks. A holder that works on the connection itself has lost the lock with it.
CREATE FUNCTION stampede.dead(its stampede.locks) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    noticed float8;
BEGIN
    IF NOT stampede.gone(its) THEN
        RETURN false;
    ELSIF its.session THEN
        RETURN true;
    END IF;
    SELECT m.since INTO noticed FROM stampede.missed m WHERE m.pid = its.pid AND m.started = its.started;
    -- (Two transactions that both wait to write this could wait for each other: whoever comes second leaves it.)
    IF noticed IS NULL AND pg_try_advisory_xact_lock(8319104481669375079) THEN
        INSERT INTO stampede.missed VALUES (its.pid, its.started, stampede.clock()) ON CONFLICT DO NOTHING;
    END IF;
    RETURN coalesce(noticed <= stampede.clock() - 1, false);
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
        ELSIF stampede.dead(its) THEN
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
        holder := CASE WHEN rest > 0 AND NOT stampede.dead(its) THEN its.token END;
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
    DELETE FROM stampede.missed m WHERE m.since < stampede.clock() - 86400;
    FOR each IN
        SELECT l.* FROM stampede.locks l
        WHERE CASE WHEN l.crowd THEN NOT EXISTS (
                       SELECT FROM stampede.inside i WHERE i.id = l.id AND i.ends > stampede.clock()
                           AND NOT stampede.dead(stampede.as_lock(i))
                   )
              WHEN l.token IS NULL THEN l.turn_ends < stampede.clock()
              ELSE l.ends <= stampede.clock() OR stampede.dead(l) END
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
        ELSIF its.token IS NOT NULL AND stampede.dead(its) THEN
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
