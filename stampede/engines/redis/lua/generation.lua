-- The ids of today's generations. One that is missing (never bumped, evicted, flushed) is new: old ones never come back.
-- Behind them, if they are asked for, those that ended a moment ago, as `bump.lua` has noted them.
--
-- A server that is started again has what its last snapshot had: also what has been invalidated since. So all that is
-- older ends with a run; but not where a replica has taken over, which was there all the time, and was told.
--
-- KEYS: of all scopes, of this one, the run; then perhaps the notes of the two
-- ARGV: two new ids; 'first' if the server had forgotten this script
local run, at = string.match(redis.call('GET', KEYS[3]) or '', '(%w+)@(%d+)')
local time = redis.pcall('TIME')
local now = time.err and 0 or time[1] * 1000 + math.floor(time[2] / 1000)
local mine = run

if ARGV[3] or not run then
  local info = redis.pcall('INFO', 'server')
  if type(info) == 'string' then  -- or this user may not ask
    mine = string.match(info, 'run_id:(%w+)')
    local up = tonumber(string.match(info, 'uptime_in_seconds:(%d+)'))
    -- Between two moments in whole seconds: in doubt it was started later.
    if ARGV[3] and mine ~= run and (not run or time.err or now - 1000 * up + 1000 >= tonumber(at)) then
      glance(KEYS[1])  -- see below
      redis.call('SET', KEYS[1], ARGV[1])
    end
  end
end
-- Noted anew now and then: a server that was started since then has not been told of all.
if mine and (mine ~= run or math.abs(now - at) > 10000) then
  redis.pcall('SET', KEYS[3], mine .. '@' .. string.format('%.0f', now))
end

local ids = {}
for number = 1, 2 do
  local key = KEYS[number]
  ids[number] = redis.call('GET', key)  -- followed, so that the next bump is told
  if not ids[number] then
    glance(key)  -- has begun to write: a server that is full has no room for values, and needs generations all the same
    redis.call('SET', key, ARGV[number])
    ids[number] = ARGV[number]
  end
end
for number = 4, #KEYS do
  ids[#ids + 1] = glance(KEYS[number]) or ''
end
return ids
