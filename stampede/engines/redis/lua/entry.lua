-- In front of every script: what an entry's string is, and how the herd is told.
--
-- An entry is 50 bytes of ours (see wire.py) and the value. Its times are lags behind the end of its key: with PTTL,
-- the server's own clock says what is left of them. A key without end never ends.
--
-- The server keeps ends as moments of its wall clock: where that was set back, a key shows more time than it was given.
-- Whoever meets such a key cuts it to that: what it was given is known from what is in it.
local HEAD, LAYOUT, SLACK = 50, '>BBc8ddddd', 1000

local NOTHING, DAMAGED = -2, -3  -- in the place of the ms left

-- The entry's string, ms left of its key, ms left of fresh and of keep, id, cost, margin, ttl; or false, and why.
local function look(key)
  local string = redis.pcall('GET', key)  -- somebody's list is no entry
  if not string then
    return false, NOTHING
  elseif type(string) ~= 'string' or #string < HEAD or string.byte(string) ~= 1 then
    return false, DAMAGED
  end
  local left = redis.call('PTTL', key)
  local _, _, id, lag, keeplag, cost, margin, ttl = struct.unpack(LAYOUT, string)
  if not (lag == lag and keeplag == keeplag and cost - cost == 0 and margin >= 0 and ttl >= 0) then
    return false, DAMAGED  -- what is no number (NaN) compares to nothing
  end
  local ms, most = left < 0 and math.huge or left, lag + 1000 * ttl
  if ms > most + SLACK then
    left = math.ceil(most)
    ms = left
    redis.pcall('PEXPIRE', key, left)
  end
  return string, left, ms - lag, ms - keeplag, id, cost, margin, ttl
end

-- GET, unseen by CLIENT TRACKING, which follows commands that only read: nobody keeps leases, and each change of one
-- would be told to everybody who looked. (Not before an entry is stored, unless that is meant: a script that has begun
-- to write, as this counts, is not refused any more when memory is full.)
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

-- Always last, and protected: a user without channel rights must not be left with a lease that stands.
local function wake(channel, message)
  redis.pcall('PUBLISH', channel, message)
end
