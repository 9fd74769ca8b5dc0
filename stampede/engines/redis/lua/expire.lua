-- Make the entry stale, and keep it as long as before. End a lease under way, and wake the herd. Return 1 if there was
-- something fresh.
--
-- KEYS: entry, lease   ARGV: ms that count as for ever, channel

local entry, left, fresh = look(KEYS[1])
local soft = entry and fresh > 0
-- First, so that no later write is refused, even if memory is full.
local died = redis.call('DEL', KEYS[2]) == 1
if soft then
  local lag = left
  if left < 0 then  -- a key without an end gets one to count from
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
