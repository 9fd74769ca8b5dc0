-- Give a generation a new softer part: stored entries remain, but are stale. Behind the id follow `~` and another id.
--
-- KEYS: generation   ARGV: a new id, if the generation is missing; the other id

local id = string.match(glance(KEYS[1]) or '', '^%w+') or ARGV[1]
redis.call('SET', KEYS[1], id .. '~' .. ARGV[2])
return 1
