-- Take the lock, or say who has it, and take a place in the queue. Who came first is first, however the lock came free.
--
-- KEYS: lock, fence, queue, homes, turn
-- ARGV: token, lease in ms, channel, where this process listens ('' if this caller won't wait), its arrival ('' if this
-- is the first time it asks), ms for which the queue is kept
-- Answers {1, fence} or {0, token, ms left, arrival, how many are before it}.
local token, home, now = ARGV[1], ARGV[4], clock()
local fence, length = granted(KEYS[2])

local holder, left = redis.call('GET', KEYS[1]), KEYS[1]
if holder == token then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, fence}
end
if not holder then
  holder, left = redis.call('GET', KEYS[5]), KEYS[5]
  if not holder then  -- its lease ended, or the one whose turn it was didn't come
    if home ~= '' and ARGV[5] ~= '' then
      redis.call('ZADD', KEYS[3], 'NX', ARGV[5], token)
      redis.call('HSET', KEYS[4], token, string.format('%.0f ', now / 1000) .. home)
    end
    holder = hand_on(KEYS[3], KEYS[4], KEYS[5], ARGV[3], now)
  end
  if not holder or holder == token then
    -- The clock keeps it growing also over a counter that has ended, was evicted or flushed.
    fence = string.format('%.0f', math.max(fence + 1, now))
    redis.call('SET', KEYS[2], fence .. ' ' .. ARGV[2], 'PX', ARGV[2] + FENCED)
    redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
    redis.call('DEL', KEYS[5])
    leave(KEYS[3], KEYS[4], token)
    return {1, tonumber(fence)}
  end
end

local rest = redis.call('PTTL', left)
if left == KEYS[1] and length and rest > length then  -- the server's clock was set back
  redis.call('PEXPIRE', KEYS[1], length)
  rest = length
end
if home == '' then
  return {0, holder, rest, 0, 0}
end
local arrival = tonumber(ARGV[5])
if not arrival then
  local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
  arrival = math.max(now, (tonumber(last) or 0) + 1)
end
redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', arrival), token)
redis.call('HSET', KEYS[4], token, string.format('%.0f ', now / 1000) .. home)
redis.call('PEXPIRE', KEYS[3], ARGV[6])
redis.call('PEXPIRE', KEYS[4], ARGV[6])
return {0, holder, rest, arrival, redis.call('ZRANK', KEYS[3], token)}
