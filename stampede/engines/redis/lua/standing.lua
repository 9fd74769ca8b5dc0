-- Whether this token still has the lock, or the turn.
--
-- KEYS: lock, turn   ARGV: token
return (glance(KEYS[1]) or glance(KEYS[2])) == ARGV[1] and 1 or 0
