-- Make the lock's lease end in so many ms from now. Return 0 if it is lost.
--
-- KEYS: lock   ARGV: token, ms
local its = loaded()
local mine = its.inside[place_of(its, ARGV[1])]
if not mine then
  return 0
end
mine.lease = tonumber(ARGV[2])
mine.ends = now + mine.lease
save(its)
return 1
