-- Make the lease end in so many ms from now. Return 0 if it is lost.
--
-- KEYS: lease   ARGV: token, ms

-- lease

local token, given, whole = token_of(glance(KEYS[1]))
if token ~= ARGV[1] then
  return 0
end
return prolong(KEYS[1], whole, ARGV[2], given)
