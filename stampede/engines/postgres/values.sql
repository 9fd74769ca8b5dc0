-- Values and leases. These functions decide as stampede/model/record.py does.
--
-- A function that changes a key takes the key's advisory lock first, until the end of its transaction, and reads in
-- later statements, which see all that was committed before.

CREATE FUNCTION stampede.version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 7';

CREATE FUNCTION stampede.clock() RETURNS float8 LANGUAGE sql VOLATILE AS $$
    SELECT date_part('epoch', clock_timestamp())
$$;

-- Return whether this backend is still there. True also for NULL, and if this role may not see when it started.
CREATE FUNCTION stampede.lives(its_pid int, its_start float8) RETURNS bool LANGUAGE sql VOLATILE AS $$
    SELECT its_pid IS NULL OR EXISTS (
        SELECT FROM pg_stat_get_activity(its_pid) AS backend
        WHERE backend.backend_start IS NULL OR date_part('epoch', backend.backend_start) = its_start
    )
$$;

-- Take an advisory lock before a decision, and return the time after that. Only READ COMMITTED will do: with one
-- snapshot for the whole transaction, decisions made while this one waited would not be seen.
CREATE FUNCTION stampede.alone(its_lock bigint) RETURNS float8 LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'stampede decides in transactions that are READ COMMITTED' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN  -- a lost commit would repeat a fence
        PERFORM set_config('synchronous_commit', 'local', true);
    END IF;
    PERFORM pg_advisory_xact_lock(its_lock);
    RETURN stampede.clock();
END $$;

-- After each change of a key: notify the processes with a local tier when the transaction commits. `keep` takes the
-- same lock exclusively.
CREATE FUNCTION stampede.tell(its bytea) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(8319104481669375077);
    IF EXISTS (SELECT FROM stampede.keepers) THEN
        PERFORM pg_notify('stampede', encode(substring(its FOR 2), 'hex'));
    END IF;
END $$;

-- Note a process that has a local tier: from now on it is notified of changes.
CREATE FUNCTION stampede.keep(its_home text, its_pid int, its_start float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(8319104481669375077);  -- wait for changes under way, which have not seen this process
    DELETE FROM stampede.keepers AS k WHERE NOT stampede.lives(k.pid, k.started);
    INSERT INTO stampede.keepers VALUES (its_home, its_pid, its_start) ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION stampede.small(value bytea) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(value) <= 65536 THEN value END
$$;

-- Return the value, or grant the right to compute it. `answer` is 0: found, 1: granted, 2: busy, 3: failed. A large
-- value is left out: the key is locked while it is sent, and the receiver may be frozen.
CREATE FUNCTION stampede.claim(
    its bytea, its_lock bigint, its_name bytea, mine bytea, seconds float8, draw float8, since float8, seen bytea,
    awaited bytea, force bool, my_holder text, my_pid int, my_start float8,
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
    IF e.stored > now + 1 THEN  -- the clock was set back: the entry must not get more time than it was given
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

    SELECT * INTO l FROM stampede.leases WHERE id = its FOR UPDATE;  -- FOR UPDATE: `await` writes here without the lock
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
    IF l.token <> mine THEN  -- another lease ends: its waiters are notified
        token := l.token; homes := l.homes;
        l.homes := NULL;
    END IF;
    INSERT INTO stampede.leases AS leases (id, name, written, taken, token, ends, holder, pid, started)
        VALUES (its, its_name, now, now, mine, now + seconds, my_holder, my_pid, my_start)
        ON CONFLICT (id) DO UPDATE SET written = now, taken = now, token = mine, ends = now + seconds, holder = my_holder,
            pid = my_pid, started = my_start, homes = l.homes;
END $$;

-- Store an entry if the lease is valid. `homes`: the processes to notify, if it was. In an entry that is passed,
-- `fresh`, `keep` and `gone` are seconds from now, and `stored` is ignored. `same_as`: the id of the stored entry whose
-- value stays (NULL: none); then the value that is passed is ignored.
CREATE FUNCTION stampede.fill(
    e stampede.entries, its_lock bigint, mine bytea, same_as bytea, OUT done bool, OUT homes text[]
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    IF same_as IS NOT NULL THEN
        UPDATE stampede.entries AS s SET entry = e.entry, fresh = now + e.fresh, keep = now + e.keep, gone = now + e.gone,
            stored = now, ttl = e.ttl
            WHERE s.id = e.id AND s.entry = same_as
                AND EXISTS (SELECT FROM stampede.leases AS l WHERE l.id = e.id AND l.token = mine AND l.ends > now);
        IF NOT FOUND THEN
            done := EXISTS (SELECT FROM stampede.entries AS s WHERE s.id = e.id AND s.entry = e.entry AND s.gone > now);
            RETURN;
        END IF;
    END IF;
    DELETE FROM stampede.leases AS l WHERE l.id = e.id AND l.token = mine AND l.ends > now
        RETURNING l.homes INTO homes;
    done := FOUND;
    IF done AND same_as IS NOT NULL THEN
        PERFORM stampede.tell(e.id);
    ELSIF done THEN
        PERFORM stampede.store(e, now);
    ELSE  -- perhaps this call was sent again
        done := EXISTS (SELECT FROM stampede.entries AS s WHERE s.id = e.id AND s.entry = e.entry AND s.gone > now);
    END IF;
END $$;

CREATE FUNCTION stampede.store(e stampede.entries, now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO stampede.entries VALUES (e.id, e.name, e.entry, now + e.fresh, now + e.keep, now + e.gone, now, e.cost,
            e.margin, e.ttl, e.raised, e.value)
        ON CONFLICT (id) DO UPDATE SET entry = EXCLUDED.entry, fresh = EXCLUDED.fresh, keep = EXCLUDED.keep,
            gone = EXCLUDED.gone, stored = EXCLUDED.stored, cost = EXCLUDED.cost, margin = EXCLUDED.margin,
            ttl = EXCLUDED.ttl, raised = EXCLUDED.raised, value = EXCLUDED.value;
    PERFORM stampede.tell(e.id);
END $$;

-- Drop the lease if it is valid, and leave a verdict (for `told` seconds) and a rest.
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
    IF NOT done THEN RETURN; END IF;
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

-- Note that a process waits for this lease (NULL: do not note it). false: there is nothing to wait for.
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

-- Changes by other means than a computation. They end the lease under way: `token` is its token, and `homes` are the
-- processes to notify.

CREATE FUNCTION stampede.set(e stampede.entries, its_lock bigint, OUT token bytea, OUT homes text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    DELETE FROM stampede.leases AS l WHERE l.id = e.id RETURNING l.token, l.homes INTO token, homes;
    PERFORM stampede.store(e, now);
END $$;

-- Store an entry if the stored one has the id `seen` (NULL: if none is stored).
CREATE FUNCTION stampede.replace(
    e stampede.entries, its_lock bigint, seen bytea, OUT done bool, OUT token bytea, OUT homes text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
    there bytea := (SELECT s.entry FROM stampede.entries AS s WHERE s.id = e.id AND s.keep > now);
BEGIN
    done := there IS NOT DISTINCT FROM seen;
    IF done THEN
        DELETE FROM stampede.leases AS l WHERE l.id = e.id RETURNING l.token, l.homes INTO token, homes;
        PERFORM stampede.store(e, now);
    ELSE
        done := there IS NOT DISTINCT FROM e.entry;  -- this call was sent again
    END IF;
END $$;

-- Make the entry stale now; it is kept as long as before. `done`: it was fresh.
CREATE FUNCTION stampede.expire(its bytea, its_lock bigint, OUT done bool, OUT token bytea, OUT homes text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now float8 := stampede.alone(its_lock);
BEGIN
    UPDATE stampede.entries SET stored = least(stored, now), fresh = now, gone = greatest(keep, now + 1)
        WHERE id = its AND fresh > now;
    done := FOUND;
    PERFORM stampede.tell(its);  -- even if there was no entry: a local tier may have one that was removed here
    SELECT l.token, l.homes INTO token, homes FROM stampede.leases AS l WHERE l.id = its FOR UPDATE;
    IF token IS NOT NULL THEN
        UPDATE stampede.leases SET written = now, token = NULL, ends = '-infinity', homes = NULL WHERE id = its;
        DELETE FROM stampede.leases WHERE id = its AND tokens IS NULL AND rest <= now;
    END IF;
END $$;

-- Remove entry, lease, verdicts and rest. `done`: there was a value.
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

-- Return the current generation of each of these scopes, and those that ended within the last `lately` seconds. A
-- missing one is created from `new`, so that an old one never comes back.
CREATE FUNCTION stampede.generations(asked bytea[], new text[], lately float8)
RETURNS TABLE (id text, noted text[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (  -- a read-only server refuses INSERT even if there is nothing to insert
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

-- Begin a new generation; or, with `softer`, give the current one a new soft part, which follows a `~`.
CREATE FUNCTION stampede.bump(its bytea, new text, softer text, most int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF softer IS NULL THEN
        INSERT INTO stampede.generations AS g (scope, id) VALUES (its, new)
            ON CONFLICT (scope) DO UPDATE SET id = new, noted = (g.id || g.noted)[:most],
                ended = (stampede.clock() || g.ended)[:most];
    ELSE
        INSERT INTO stampede.generations AS g (scope, id) VALUES (its, new || '~' || softer)
            ON CONFLICT (scope) DO UPDATE SET id = split_part(g.id, '~', 1) || '~' || softer;
    END IF;
    PERFORM pg_notify('stampede', 'g' || encode(substring(its FROM 1 FOR 1), 'hex'));  -- '' stands for all scopes
    IF current_setting('synchronous_commit') = 'off' THEN  -- a lost commit would revive old keys
        PERFORM set_config('synchronous_commit', 'local', true);
    END IF;
END $$;

-- When an administrator empties a table, processes that listen must forget what they have read from it.
CREATE FUNCTION stampede.emptied() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('stampede', 'g');
    RETURN NULL;
END $$;

CREATE TRIGGER emptied AFTER TRUNCATE OR DELETE ON stampede.generations EXECUTE FUNCTION stampede.emptied();
CREATE TRIGGER emptied AFTER TRUNCATE ON stampede.entries EXECUTE FUNCTION stampede.emptied();

-- Remove expired rows among some entries and leases: up to `most` of each, in the order of their ids, from `start` on.
-- Two sweeps at once skip each other's rows. Ids are hashes, so the distance between them tells about how many entries
-- there are (`about`), without a count. If these are more than `room`, or their values larger in all than `bytes`, the
-- excess is evicted: stale entries first, then the oldest. `over`: how many entries were removed.
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
    DELETE FROM stampede.keepers WHERE (pid, started) IN (  -- these would cause useless notices
        SELECT k.pid, k.started FROM stampede.keepers AS k WHERE NOT stampede.lives(k.pid, k.started) FOR UPDATE SKIP LOCKED
    );
    over := 0; about := 0;
    IF seen = 0 THEN RETURN; END IF;
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

-- Return the position of an id among all possible ids, from 0 to 1.
CREATE FUNCTION stampede.place(its bytea) RETURNS float8 LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x' || encode(substring(its FOR 6), 'hex'))::bit(48)::bigint / 281474976710656.0::float8
$$;
