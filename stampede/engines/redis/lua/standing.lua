-- Whether this token still has the lock, or the turn.
--
-- KEYS: lock, turn   ARGV: token
return (redis.call('GET', KEYS[1]) or redis.call('GET', KEYS[2])) == ARGV[1] and 1 or 0
