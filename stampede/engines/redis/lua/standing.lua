-- Return whether there is still something to wait for: this token is inside or called; or, for a waiter with a place,
-- it is still in the queue, and others are inside or called. If a lease has ended by itself, no waiter was notified:
-- return 0.
--
-- KEYS: lock, queue   ARGV: token, the waiter's own token ('' if it has no place)
local its = loaded()
if lapsed or not (its.turn or its.inside[1]) then
  return 0
elseif ARGV[2] ~= '' then
  return redis.call('ZSCORE', KEYS[2], ARGV[2]) and 1 or 0
end
return (its.turn == ARGV[1] or place_of(its, ARGV[1])) and 1 or 0
