-- Store if the stored entry has the id that was seen ('': nothing is stored). Return 1; also for the same call sent
-- again.
--
-- KEYS: entry, lease, past, rest   ARGV: ms until its key ends ('': never), entry, channel, seen, entry's id

local entry, _, _, keep, id = look(KEYS[1])
if not entry or keep <= 0 then
  id = ''
end
if id ~= ARGV[4] then
  return id == ARGV[5] and 1 or 0
end
store(KEYS[1], ARGV[2], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
wake(ARGV[3], '')
return 1
