-- What is kept, without leave to compute: {ms left of the entry's key, entry}, or nothing; {DAMAGED} if it is no entry.
--
-- KEYS: entry   ARGV: most bytes of an entry that may be answered ('': any); {} if it is larger
local entry, left, _, keep = look(KEYS[1])
local most = tonumber(ARGV[1])
if most and entry and #entry > most then
  return {}
end
if left == DAMAGED then
  return {DAMAGED}
end
return entry and keep > 0 and {left, entry}
