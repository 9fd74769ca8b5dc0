-- Whether there is still something to wait for: this token is inside or called; or, of one in the queue, that it is in
-- it still, and others are inside or called. If a lease has ended by itself, nobody was told.
--
-- KEYS: lock, queue   ARGV: token, the one in the queue ('' if it has no place)
local its = loaded()
if lapsed or not (its.turn or its.inside[1]) then
  return 0
elseif ARGV[2] ~= '' then
  return redis.call('ZSCORE', KEYS[2], ARGV[2]) and 1 or 0
end
return (its.turn == ARGV[1] or place_of(its, ARGV[1])) and 1 or 0
