-- Stale from now on, and kept as long as it would have been. 1: there was something fresh.
--
-- KEYS: entry   ARGV: ms that are as good as for ever
local entry, left, fresh = look(KEYS[1])
if not entry or fresh <= 0 then
  return 0
end
local lag = left
if left < 0 then  -- without an end there is nothing to count from
  lag = ARGV[1]
  redis.call('PEXPIRE', KEYS[1], lag)
  redis.call('SETRANGE', KEYS[1], 18, struct.pack('>d', -math.huge))
end
redis.call('SETRANGE', KEYS[1], 10, struct.pack('>d', lag))
return 1
