-- Let the lock stand for so long from now, and its fence be remembered for longer. 0: it is lost.
--
-- KEYS: lock, fence   ARGV: token, ms, ms for the fence
if glance(KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
