-- Let the lock stand for so long from now, and its fence be remembered for longer. 0: it is lost.
--
-- KEYS: lock, fence, inside, rooms, terms, whose   ARGV: token, ms, ms for the fence
local holder = glance(KEYS[1])
if holder == '' then
  roomy()
  local its, now = {lock = KEYS[1], inside = KEYS[3], rooms = KEYS[4], terms = KEYS[5]}, clock()
  first_of(its, now)
  if not redis.call('ZSCORE', its.inside, ARGV[1]) then
    return 0
  end
  stand(its, ARGV[1], terms_of(its, ARGV[1]), ARGV[2], now)
  redis.call('PEXPIRE', KEYS[2], math.max(ARGV[3], redis.call('PTTL', KEYS[2])))
  return 1
end
if holder ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[6], ARGV[2])
return last(KEYS[1], KEYS[2], ARGV[2])
