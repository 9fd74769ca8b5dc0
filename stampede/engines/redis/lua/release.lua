-- Give the lock back (or the turn, or the place in the queue), and keep it for the one who has waited longest.
--
-- KEYS: lock, queue, homes, turn, done, fence
-- ARGV: token, channel, this call's id
-- 1: it was ours.
if glance(KEYS[5]) == ARGV[3] then
  return 1  -- this very call, sent again
end
local ours = glance(KEYS[1]) == ARGV[1]
if ours then
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[5], ARGV[3], 'PX', 10000)
  redis.call('PEXPIRE', KEYS[6], FENCED)
elseif glance(KEYS[4]) == ARGV[1] then
  redis.call('DEL', KEYS[4])
else
  leave(KEYS[2], KEYS[3], ARGV[1])
  return 0
end
if not hand_on(KEYS[2], KEYS[3], KEYS[4], ARGV[2], clock()) then
  wake(ARGV[2], '')  -- whoever waits without a place
end
return ours and 1 or 0
