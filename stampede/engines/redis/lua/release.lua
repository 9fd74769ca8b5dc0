-- Give back the lock (or the turn, or the place in the queue), and call the next. Return 1 if the lock was the
-- caller's.
--
-- KEYS: lock, queue, notes of waiters   ARGV: token, channel, this call's id
local its = loaded()
if string.find(its.done, ARGV[3], 1, true) then
  return 1  -- the same call, sent again
end
local mine = place_of(its, ARGV[1])
if mine then
  table.remove(its.inside, mine)
  its.done = ARGV[3] .. string.sub(its.done, 1, 120)  -- enough for those that leave at the same time
elseif its.turn == ARGV[1] then
  its.turn = nil
end
if not mine then
  leave(ARGV[1])
end
call_next(its, ARGV[2])
if not its.turn then
  wake(ARGV[2], '')  -- waiters without a place in the queue
end
save(its)
return mine and 1 or 0
