-- The ids of today's generations. One that is missing (never bumped, evicted, flushed) is new: old ones never come back.
--
-- KEYS: any   ARGV: a new id for each
local ids = {}
for number, key in ipairs(KEYS) do
  ids[number] = redis.call('GET', key)  -- followed, so that the next bump is told
  if not ids[number] then
    glance(key)  -- has begun to write: a server that is full has no room for values, and needs generations all the same
    redis.call('SET', key, ARGV[number])
    ids[number] = ARGV[number]
  end
end
return ids
