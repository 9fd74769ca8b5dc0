-- Store the entry if the lease is still the caller's, drop the lease, and wake the herd.
-- Answers 1: stored; 2: stored before (a fill sent again); 0: refused.
--
-- KEYS: entry, lease, past, rest; or the entry alone, as for a claim
-- ARGV: token, entry's id, ms until its key ends ('': never), entry, channel, most bytes to send along; maybe 'follow';
-- maybe the id of the stored entry whose value stays: then `entry` is the new header alone

-- lease

local tag = string.sub(KEYS[1], 1, 26)
local LEASE, PAST, REST = KEYS[2] or tag .. 'l', KEYS[3] or tag .. 'v', KEYS[4] or tag .. 'r'
if token_of(glance(LEASE)) ~= ARGV[1] then
  return redis.call('GETRANGE', KEYS[1], 2, 9) == ARGV[2] and 2 or 0
end
local whole = ARGV[4]
if ARGV[8] then
  local there = redis.pcall('GETEX', KEYS[1])
  if type(there) ~= 'string' or string.sub(there, 3, 10) ~= ARGV[8] then
    return 0
  end
  whole = whole .. string.sub(there, HEAD + 1)
end
-- The server reports only one change to a reader. The first call has it report this change, the second the next one.
local function follow()
  return ARGV[7] == 'follow' and redis.call('EXISTS', KEYS[1])
end
-- First, since a script that has freed something may store even if the server is full by now. There was room when the
-- lease was granted, and a full server grants no new ones. So what was computed meanwhile is stored.
redis.call('DEL', LEASE, PAST, REST)
follow()
store(KEYS[1], whole, ARGV[3])
follow()
if not ARGV[8] and #whole <= tonumber(ARGV[6]) then
  wake(ARGV[5], ARGV[1] .. struct.pack('>d', tonumber(ARGV[3]) or -1) .. whole)
else
  wake(ARGV[5], '')
end
return 1
