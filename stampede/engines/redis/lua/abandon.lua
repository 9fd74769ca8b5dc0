-- Drop the lease if it is still the caller's, store a verdict under its token and a rest, and wake the herd.
--
-- KEYS: lease, past, rest
-- ARGV: token, verdict ('': none), ms for which the verdict is stored, ms of rest, the rest's verdict, channel

-- lease

if token_of(glance(KEYS[1])) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
-- From here on nothing is refused, even if memory is full, since the script has already written (and freed) something.
if ARGV[2] ~= '' then
  if redis.call('HLEN', KEYS[2]) >= 64 then
    redis.call('DEL', KEYS[2])
  end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
if ARGV[4] ~= '0' then
  redis.call('SET', KEYS[3], noted(ARGV[5], ARGV[4]), 'PX', ARGV[4])
end
wake(ARGV[6], '')
return 1
