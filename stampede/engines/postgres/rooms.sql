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
        ELSIF stampede.dead(its) THEN
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
                AND stampede.dead(stampede.as_lock(i))
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
