-- Give the lock back (or the turn, or the place in the queue), and call the next. 1: it was ours.
--
-- KEYS: lock, queue, notes of who waits   ARGV: token, channel, this call's id
local its = loaded()
if string.find(its.done, ARGV[3], 1, true) then
  return 1  -- this very call, sent again
end
local mine = place_of(its, ARGV[1])
if mine then
  table.remove(its.inside, mine)
  its.done = ARGV[3] .. string.sub(its.done, 1, 120)  -- of those that leave at once
elseif its.turn == ARGV[1] then
  its.turn = nil
end
if not mine then
  leave(ARGV[1])
end
call_next(its, ARGV[2])
if not its.turn then
  wake(ARGV[2], '')  -- who waits without a place
end
save(its)
return mine and 1 or 0
