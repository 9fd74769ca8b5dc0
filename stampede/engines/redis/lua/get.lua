-- Return what is stored, without a lease: {ms left of the entry's key, entry}, or nothing; {DAMAGED} if it is not an
-- entry.
--
-- KEYS: entry
local entry, left, _, keep = look(KEYS[1])
if left == DAMAGED then
  return {DAMAGED}
end
return entry and keep > 0 and {left, entry}
