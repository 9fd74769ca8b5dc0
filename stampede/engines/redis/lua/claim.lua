-- The value, or the right to compute it, decided in one step. Durations in ms.
--
-- KEYS: entry, lease, past, rest; or the entry alone, where reads are followed: Redis 6.2 and 7.0 would remember all keys
-- that are named, and tell of each lease
-- ARGV: token, lease, draw, whose the lease is ('@host:pid', or ''); of a claim that is not the plain first one also:
-- since, seen, awaited, force, channel
-- Answers {what, ms left of the entry's key, entry, and: busy: token, ms left / failed: verdict, ms of rest /
-- refused: why}.
local FOUND, GRANTED, BUSY, FAILED, REFUSED = 0, 1, 2, 3, 4
local token, draw = ARGV[1], ARGV[3]
local since, seen, awaited, force = ARGV[5] or '0', ARGV[6] or '', ARGV[7] or '', ARGV[8] == '1'

-- Why the server did not write, if it did not.
local function refusal_of(answer)
  return type(answer) == 'table' and answer.err
end

-- A server that is not the master any more has nothing to say, since of what is invalidated elsewhere it may never hear.
local function demoted(answer)
  local why = refusal_of(answer)
  return why and string.find(why, 'READONLY', 1, true) and redis.error_reply('READONLY this is a replica by now')
end

local tag = string.sub(KEYS[1], 1, 26)
local LEASE = KEYS[2] or tag .. 'l'
local entry, left, fresh, keep, id, cost, margin, ttl = look(KEYS[1])
local good = entry and not force and id ~= seen and fresh > -since
-- The early draw: an entry that is due is not good enough, but is kept.
if good and (draw == '' or fresh > 1000 * math.min(margin + draw * cost, ttl / 2)) then
  return demoted(redis.pcall('GETEX', LEASE)) or {FOUND, left, entry}
end

-- After the hits, since each function that is defined is paid for by every call:
-- lease

local PAST, REST = KEYS[3] or tag .. 'v', KEYS[4] or tag .. 'r'
if entry and keep <= 0 then
  entry, left = false, NOTHING
end

if not force then
  local verdict = awaited ~= '' and redis.call('HGET', PAST, awaited)
  local rest = redis.call('PTTL', REST)
  if verdict or rest > 0 then
    local why, given = token_of(redis.call('GET', REST))
    if given and rest > given then
      rest = left_of(REST, given)
    end
    return {FAILED, left, entry, verdict or why, math.max(rest, 0)}
  end
end

-- Nothing is written before it, or a server that is full would not refuse it.
local answer = redis.pcall('SET', LEASE, noted(token .. ARGV[4], ARGV[2]), 'PX', ARGV[2], force and 'GET' or 'NX')
local refusal, nothing = refusal_of(answer), demoted(answer)
if nothing then
  return nothing
elseif (force or answer) and not refusal then
  glance(LEASE)  -- as it looks to the server, the token may be as old as the last script: the first to be evicted
  if force and answer and token_of(answer) ~= token then
    wake(ARGV[9], '')
  end
  return {GRANTED, left, entry}
end

-- (GETEX is a write, as this counts)
local standing, given, whole = token_of(not force and redis.call(refusal and 'GET' or 'GETEX', LEASE))
if standing == token then
  prolong(LEASE, whole, ARGV[2], given)
  return {GRANTED, left, entry}
elseif standing then
  return {BUSY, left, entry, standing, left_of(LEASE, given or tonumber(ARGV[2]))}
elseif good and fresh > 0 then
  return {FOUND, left, entry}  -- it was due, and can't be refreshed
end
return {REFUSED, left, entry, refusal}
