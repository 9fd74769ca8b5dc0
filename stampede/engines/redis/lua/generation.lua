-- The ids of today's generations. One that is missing (never bumped, evicted, flushed) is new: old ones never come back.
--
-- KEYS: any   ARGV: a new id for each
local ids = {}
for number, key in ipairs(KEYS) do
  ids[number] = redis.call('GET', key)
  if not ids[number] then
    redis.call('SET', key, ARGV[number])
    ids[number] = ARGV[number]
  end
end
return ids
