-- Put in front of every script: how to read an entry's string, and how to wake the herd.
--
-- An entry is a header of 50 bytes (see wire.py) and the value. Its times are lags behind the end of its key: with
-- PTTL, the server's own clock says what is left of them. An entry whose key has no end never ends.
--
-- The server stores ends as moments of its wall clock. If that was set back, a key shows more time than it was given. A
-- script that finds such a key cuts it to the time it was given, which the header tells.
local HEAD, LAYOUT, SLACK = 50, '>BBc8ddddd', 1000

local NOTHING, DAMAGED = -2, -3  -- in place of the ms left

-- Return the entry's string, ms left of its key, of fresh and of keep, id, cost, margin, ttl; or false and the reason.
local function look(key)
  local string = redis.pcall('GET', key)  -- a key of another type is no entry
  if not string then
    return false, NOTHING
  elseif type(string) ~= 'string' or #string < HEAD or string.byte(string) ~= 1 then
    return false, DAMAGED
  end
  local left = redis.call('PTTL', key)
  local _, _, id, lag, keeplag, cost, margin, ttl = struct.unpack(LAYOUT, string)
  if not (lag == lag and keeplag == keeplag and cost - cost == 0 and margin >= 0 and ttl >= 0) then
    return false, DAMAGED  -- comparisons with NaN are false
  end
  local ms, most = left < 0 and math.huge or left, lag + 1000 * ttl
  if ms > most + SLACK then
    left = math.ceil(most)
    ms = left
    redis.pcall('PEXPIRE', key, left)
  end
  return string, left, ms - lag, ms - keeplag, id, cost, margin, ttl
end

-- GET, unseen by CLIENT TRACKING, which follows only commands that read. No local tier keeps leases, and each change of
-- one would be reported to all readers. (Do not use this before an entry is stored, unless on purpose: GETEX counts as
-- a write, and after a write a script is not refused when memory is full.)
local function glance(key)
  return redis.call('GETEX', key)
end

local function store(key, string, ms)
  if ms == '' then
    redis.call('SET', key, string)
  else
    redis.call('SET', key, string, 'PX', ms)
  end
end

-- Always last, and protected: a user without channel rights must not be left with an unused lease.
local function wake(channel, message)
  redis.pcall('PUBLISH', channel, message)
end
