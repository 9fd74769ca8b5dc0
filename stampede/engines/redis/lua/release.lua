-- Give the lock back (or the turn, or the place in the queue), and keep it for the one who has waited longest.
--
-- KEYS: lock, queue, homes, turn, done, fence, inside, rooms, terms, whose
-- ARGV: token, channel, this call's id
-- 1: it was ours.
local done = glance(KEYS[5])
if done and string.find(done, ARGV[3], 1, true) then
  return 1  -- this very call, sent again
end
local holder = glance(KEYS[1])
if holder == '' then
  roomy()
  local its, now = {lock = KEYS[1], inside = KEYS[7], rooms = KEYS[8], terms = KEYS[9]}, clock()
  local some = first_of(its, now)
  local ours = some and redis.call('ZSCORE', its.inside, ARGV[1])
  if ours then
    go(its, ARGV[1])
    some = first_of(its, now)
    -- Some may leave at once: the ids of the last ones.
    redis.call('SET', KEYS[5], ARGV[3] .. string.sub(done or '', 1, 504), 'PX', 10000)
  elseif glance(KEYS[4]) == ARGV[1] then
    redis.call('DEL', KEYS[4])
  else
    leave(KEYS[2], KEYS[3], ARGV[1])
  end
  if not glance(KEYS[4]) then
    local called, full = hand_on(KEYS[2], KEYS[3], KEYS[4], ARGV[2], now, some and its)
    if not (called or full) then
      wake(ARGV[2], '')
    end
  end
  return ours and 1 or 0
end
local ours = holder == ARGV[1]
if ours then
  redis.call('DEL', KEYS[1], KEYS[10])
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
