-- Delete value, lease, verdicts and rest together, so that a fill under way is refused. Return 1 if there was a value.
--
-- KEYS: entry, lease, past, rest   ARGV: channel

local entry, _, _, keep = look(KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
wake(ARGV[1], '')
return entry and keep > 0 and 1 or 0
