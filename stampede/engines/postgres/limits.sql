-- Limits. These functions decide as stampede/model/limit_window.py does, which says why; tests compare the two. All times are
-- microseconds by this server's clock. Starts are forgotten in a crash, unless the tables are durable.

-- Lock a limit, and return it as it is now: window.py's `_today`.
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

-- Store a limit. If it is new, sometimes remove those that are of no use any more.
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

-- Return the limit without a start that was booked: window.py's `give_back`.
CREATE FUNCTION stampede.limit_without(its stampede.limits, _cost bigint, _at bigint) RETURNS stampede.limits
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    FOR each IN 1 .. coalesce(cardinality(its.firsts), 0) LOOP
        IF its.firsts[each] <= _at AND _at <= its.lasts[each] AND its.costs[each] >= _cost THEN
            its.costs[each] := its.costs[each] - _cost;
            IF its.costs[each] = 0 THEN
                its.firsts := its.firsts[:each - 1] || its.firsts[each + 1:];
                its.lasts := its.lasts[:each - 1] || its.lasts[each + 1:];
                its.costs := its.costs[:each - 1] || its.costs[each + 1:];
            END IF;
            RETURN its;
        END IF;
    END LOOP;
    RETURN its;
END $$;

-- Return the microseconds until a start may be made; and its moment, if it is booked because they are at most `_ahead`.
-- `_was` is the moment that an earlier call booked for this start; it is kept or exchanged.
CREATE FUNCTION stampede.limit_take(
    _id bytea, _name bytea, _most bigint, _per bigint, _span bigint, _width bigint, _cost bigint, _ahead bigint,
    _was bigint, OUT delay bigint, OUT moment bigint
) LANGUAGE plpgsql AS $$
DECLARE
    booked stampede.limits := stampede.limit_today(_id, _name, _span);
    its stampede.limits := booked;
    length int;
    due bool := _was > 0 AND _was <= its.seen;
    kept bool;
    at bigint := its.seen;
    low int := 1;
    total bigint := 0;
    place int;
BEGIN
    IF _was > 0 THEN
        its := stampede.limit_without(its, _cost, _was);
    END IF;
    IF due THEN
        at := greatest(_was, its.seen - (_span - _per));
    END IF;
    IF its.rest > its.seen THEN
        at := its.rest;
    END IF;
    length := cardinality(its.firsts);
    place := length;
    FOR high IN 1 .. length LOOP
        EXIT WHEN due AND its.firsts[high] > greatest(at, its.seen);
        total := total + its.costs[high];
        WHILE total - its.costs[low] + _cost > _most LOOP
            total := total - its.costs[low];
            low := low + 1;
        END LOOP;
        IF total + _cost > _most AND its.firsts[high] - _span < at
            AND greatest(its.firsts[high], at) < its.lasts[low] + _span THEN
            at := its.lasts[low] + _span;
        END IF;
    END LOOP;
    kept := its.seen < _was AND _was <= at AND its.rest <= _was AND its.costs <> booked.costs;
    IF kept THEN
        at := _was;
    END IF;
    delay := greatest(at - its.seen, 0);
    IF delay > _ahead THEN
        IF _was > 0 OR EXISTS (SELECT FROM stampede.limits l WHERE l.id = _id AND l.seen > its.seen) THEN
            PERFORM stampede.limit_keep(its);  -- store it, so that a clock that was set back is handled only once
        END IF;
        RETURN;
    END IF;
    WHILE place > 0 AND its.firsts[place] > at LOOP
        place := place - 1;
    END LOOP;
    IF kept THEN
        its := booked;
    ELSIF place > 0 AND at <= greatest(its.lasts[place], its.firsts[place] + _width) THEN
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

-- Give back a start that was booked and is not made.
CREATE FUNCTION stampede.limit_back(_id bytea, _cost bigint, _at bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    its stampede.limits;
BEGIN
    PERFORM stampede.alone_with(_id);
    SELECT * INTO its FROM stampede.limits l WHERE l.id = _id;
    IF its.id IS NOT NULL THEN
        PERFORM stampede.limit_keep(stampede.limit_without(its, _cost, _at));
    END IF;
END $$;

-- Allow no start for so many microseconds.
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

-- Return one limit, or all, as of when each was last asked; and the time now.
CREATE FUNCTION stampede.limits_now(
    _id bytea, OUT name bytea, OUT now bigint, OUT most bigint, OUT per bigint, OUT long bigint, OUT until bigint,
    OUT rest bigint, OUT seen bigint, OUT firsts text, OUT lasts text, OUT costs text
) RETURNS SETOF record LANGUAGE sql AS $$
    SELECT l.name, floor(stampede.clock() * 1000000)::bigint, l.most, l.per, l.long, l.until, l.rest, l.seen,
           l.firsts::text, l.lasts::text, l.costs::text
    FROM stampede.limits l
    WHERE _id IS NULL OR l.id = _id
$$;
