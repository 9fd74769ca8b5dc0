-- Give the lock back (or the turn, or the place in the queue), and keep it for the one who has waited longest.
--
-- KEYS: lock, queue, heard, turn, done
-- ARGV: token, ms for which a turn is kept, ms after which one who was not heard of is gone, channel, this call's id
-- 1: it was ours.
if glance(KEYS[5]) == ARGV[5] then
  return 1  -- this very call, sent again
end
local ours = glance(KEYS[1]) == ARGV[1]
if ours then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[5], ARGV[5], 'PX', 10000)
elseif glance(KEYS[4]) == ARGV[1] then
  redis.call('DEL', KEYS[4])
else
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  return 0
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local next = ''
repeat
  local first = redis.call('ZPOPMIN', KEYS[2])[1]
  if first then
    local heard = tonumber(redis.call('HGET', KEYS[3], first)) or 0
    redis.call('HDEL', KEYS[3], first)
    if now - heard <= tonumber(ARGV[3]) then
      next = first
      redis.call('SET', KEYS[4], first, 'PX', ARGV[2])
    end
  end
until next ~= '' or not first
wake(ARGV[4], next)
return ours and 1 or 0
