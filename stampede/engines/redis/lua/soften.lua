-- A new softer part of a generation: what was kept is kept, and stale. Behind the id stands `~`, and another id.
--
-- KEYS: generation   ARGV: a new id, for one that is missing; the other id

local id = string.match(glance(KEYS[1]) or '', '^%w+') or ARGV[1]
redis.call('SET', KEYS[1], id .. '~' .. ARGV[2])
return 1
