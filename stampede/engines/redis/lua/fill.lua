-- Store if the lease stands, drop the lease, wake the herd. 1: stored (also when it was stored before: a resent fill).
--
-- KEYS: entry, lease, past, rest
-- ARGV: token, entry's id, ms until its key ends ('': never), entry, channel, most bytes to send along

-- lease
-- told

if token_of(glance(KEYS[2])) ~= ARGV[1] then
  return redis.call('GETRANGE', KEYS[1], 2, 9) == ARGV[2] and 1 or 0
end
-- First, since a script that has freed something may store in a server that is full by now. There was room when the
-- lease was granted, and none is granted any more: what was computed meanwhile goes in.
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
store(KEYS[1], ARGV[4], ARGV[3])
if #ARGV[4] <= tonumber(ARGV[6]) then
  wake(ARGV[5], ARGV[1] .. struct.pack('>d', tonumber(ARGV[3]) or -1) .. ARGV[4])
else
  wake(ARGV[5], '')
end
tell(KEYS[1])
return 1
