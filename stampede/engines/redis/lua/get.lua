-- What is kept, without leave to compute: {ms left of the entry's key, entry}, or nothing.
--
-- KEYS: entry
local entry, left, _, keep = look(KEYS[1])
return entry and keep > 0 and {left, entry}
