-- Return the ids of the current generations. One that is missing (never bumped, evicted, flushed) is replaced by a new
-- id, so old ones never come back. If asked for, also those that ended a moment ago, as `bump.lua` noted them.
--
-- A server that restarts has the data of its last snapshot, which may include entries invalidated since. So all older
-- entries end with a run of the server. If a replica has taken over they do not: it was there all the time, and
-- received all changes.
--
-- KEYS: generation of all scopes, of this scope, the run; then perhaps the notes of both generations
-- ARGV: two new ids; 'first' if the server had forgotten this script
local run, at = string.match(redis.call('GET', KEYS[3]) or '', '(%w+)@(%d+)')
local time = redis.pcall('TIME')
local now = time.err and 0 or time[1] * 1000 + math.floor(time[2] / 1000)
local mine = run

if ARGV[3] or not run then
  local info = redis.pcall('INFO', 'server')
  if type(info) == 'string' then  -- else this user may not ask
    mine = string.match(info, 'run_id:(%w+)')
    local up = tonumber(string.match(info, 'uptime_in_seconds:(%d+)'))
    -- Both moments are in whole seconds: in doubt, assume that the server was started later.
    if ARGV[3] and mine ~= run and (not run or time.err or now - 1000 * up + 1000 >= tonumber(at)) then
      glance(KEYS[1])  -- see below
      redis.call('SET', KEYS[1], ARGV[1])
    end
  end
end
-- Note the run again from time to time: a server that started after the last note may have missed changes.
if mine and (mine ~= run or math.abs(now - at) > 10000) then
  redis.pcall('SET', KEYS[3], mine .. '@' .. string.format('%.0f', now))
end

local ids = {}
for number = 1, 2 do
  local key = KEYS[number]
  ids[number] = redis.call('GET', key)  -- followed, so that the next bump is reported
  if not ids[number] then
    glance(key)  -- counts as a write, so that a full server stores the id: generations are needed even then
    redis.call('SET', key, ARGV[number])
    ids[number] = ARGV[number]
  end
end
for number = 4, #KEYS do
  ids[#ids + 1] = glance(KEYS[number]) or ''
end
return ids
