-- Remove what holds none of ours: somebody has put a list, say, where a string belongs. Its key only is lost.
--
-- KEYS: any of ours. How many were removed.
-- Asked with commands that are in use anyway, so that a user who may run the other scripts may run this one.
local probes = {v = {'HGET', ''}, H = {'HGET', ''}, Q = {'ZREM', ''}, I = {'ZREM', ''}, R = {'ZREM', ''}, E = {'HGET', ''}}
local removed = 0
for _, key in ipairs(KEYS) do
  local probe = probes[string.match(key, '^{[^}]*}(%a)$') or ''] or {'GETEX'}
  local answer = redis.pcall(probe[1], key, unpack(probe, 2))
  if type(answer) == 'table' and answer.err and string.find(answer.err, 'WRONGTYPE', 1, true) then
    removed = removed + redis.call('DEL', key)
  end
end
return removed
