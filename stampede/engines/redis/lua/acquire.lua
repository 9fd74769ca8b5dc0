-- Take the lock, or say who has it. Nobody starves: a lock that was released is kept for the one whose turn it is.
--
-- KEYS: lock, fence, queue, heard, turn
-- ARGV: token, lease in ms, '1' if this caller has been waiting, ms for which the queue is kept
-- Answers {1, fence} or {0, token, ms left}.
local token = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local holder, left = redis.call('GET', KEYS[1]), KEYS[1]
if holder == token then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, tonumber(redis.call('GET', KEYS[2])) or now}
end
if not holder then
  holder, left = redis.call('GET', KEYS[5]), KEYS[5]
  if not holder or holder == token then
    -- The clock keeps it growing also over a counter that was evicted or flushed.
    local fence = string.format('%.0f', math.max((tonumber(redis.call('GET', KEYS[2])) or 0) + 1, now))
    redis.call('SET', KEYS[2], fence)
    redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
    redis.call('DEL', KEYS[5])
    redis.call('ZREM', KEYS[3], token)
    redis.call('HDEL', KEYS[4], token)
    return {1, tonumber(fence)}
  end
end
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[3], 'NX', now, token)
  redis.call('HSET', KEYS[4], token, now)
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end
return {0, holder, redis.call('PTTL', left)}
