-- Stale from now on, and kept as long as it would have been; a lease under way dies, the herd wakes.
-- 1: there was something fresh.
--
-- KEYS: entry, lease   ARGV: ms that are as good as for ever, channel

local entry, left, fresh = look(KEYS[1])
local soft = entry and fresh > 0
-- First, so that nothing is refused behind it, even when memory is full.
local died = redis.call('DEL', KEYS[2]) == 1
if soft then
  local lag = left
  if left < 0 then  -- without an end there is nothing to count from
    lag = ARGV[1]
    redis.call('PEXPIRE', KEYS[1], lag)
    redis.call('SETRANGE', KEYS[1], 18, struct.pack('>d', -math.huge))
  end
  redis.call('SETRANGE', KEYS[1], 10, struct.pack('>d', lag))
end
if died then
  wake(ARGV[2], '')
end
return soft and 1 or 0
