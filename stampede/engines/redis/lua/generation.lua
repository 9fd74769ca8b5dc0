-- The ids of today's generations. One that is missing (never bumped, evicted, flushed) is new: old ones never come back.
-- Behind them, if they are asked for, those that ended a moment ago, as `bump.lua` has noted them.
--
-- KEYS: any, then perhaps the notes of each   ARGV: a new id for each
local ids = {}
for number, id in ipairs(ARGV) do
  local key = KEYS[number]
  ids[number] = redis.call('GET', key)  -- followed, so that the next bump is told
  if not ids[number] then
    glance(key)  -- has begun to write: a server that is full has no room for values, and needs generations all the same
    redis.call('SET', key, id)
    ids[number] = id
  end
end
for number = #ARGV + 1, #KEYS do
  ids[number] = glance(KEYS[number]) or ''
end
return ids
