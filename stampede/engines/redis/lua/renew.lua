-- Let the lease stand for so long from now. 0: it is lost.
--
-- KEYS: lease   ARGV: token, ms
if glance(KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
