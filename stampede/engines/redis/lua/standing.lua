-- Whether there is still something to wait for: this token has the lock, or the turn; or, of one in the queue, its own turn
-- is yet to come, whoever has the lock meanwhile. (Only who is told leaves the queue, and a lock that is free tells nobody.)
--
-- KEYS: lock, turn, queue   ARGV: token, the one in the queue ('' if it has no place)
local holder = glance(KEYS[1]) or glance(KEYS[2])
if ARGV[2] ~= '' then
  return holder and redis.call('ZSCORE', KEYS[3], ARGV[2]) and 1 or 0
end
return holder == ARGV[1] and 1 or 0
