-- Return the value, or grant the right to compute it, in one step. Durations are in ms.
--
-- KEYS: entry, lease, past, rest; or the entry alone if reads are followed: Redis 6.2 and 7.0 would follow all keys
-- that are named, and report each change of a lease
-- ARGV: token, lease, draw, holder of the lease ('@host:pid', or ''); for a claim that is not the plain first one also:
-- since, seen, awaited, force, channel
-- Answers {what, ms left of the entry's key, entry, ...}, and for busy: token, ms left / failed: verdict, ms of rest /
-- refused: why.
local FOUND, GRANTED, BUSY, FAILED, REFUSED = 0, 1, 2, 3, 4
local token, draw = ARGV[1], ARGV[3]
local since, seen, awaited, force = ARGV[5] or '0', ARGV[6] or '', ARGV[7] or '', ARGV[8] == '1'

-- Return why the server did not write, or false if it did.
local function refusal_of(answer)
  return type(answer) == 'table' and answer.err
end

-- Return an error if this server is no longer the master: it may never hear of invalidations elsewhere.
local function demoted(answer)
  local why = refusal_of(answer)
  return why and string.find(why, 'READONLY', 1, true) and redis.error_reply('READONLY this is a replica by now')
end

local tag = string.sub(KEYS[1], 1, 26)
local LEASE = KEYS[2] or tag .. 'l'
local entry, left, fresh, keep, id, cost, margin, ttl = look(KEYS[1])
local good = entry and not force and id ~= seen and fresh > -since
-- The early draw: an entry that is due counts as not good enough, but is returned with the grant.
if good and (draw == '' or fresh > 1000 * math.min(margin + draw * cost, ttl / 2)) then
  return demoted(redis.pcall('GETEX', LEASE)) or {FOUND, left, entry}
end

-- After the hits, since every call pays for each function defined here:
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

-- No write comes before this one, or a full server would not refuse it.
local answer = redis.pcall('SET', LEASE, noted(token .. ARGV[4], ARGV[2]), 'PX', ARGV[2], force and 'GET' or 'NX')
local refusal, nothing = refusal_of(answer), demoted(answer)
if nothing then
  return nothing
elseif (force or answer) and not refusal then
  glance(LEASE)  -- marks the key as used now, or the server may evict it first: its age counts from the last script
  if force and answer and token_of(answer) ~= token then
    wake(ARGV[9], '')
  end
  return {GRANTED, left, entry}
end

-- (GETEX counts as a write.)
local standing, given, whole = token_of(not force and redis.call(refusal and 'GET' or 'GETEX', LEASE))
if standing == token then
  prolong(LEASE, whole, ARGV[2], given)
  return {GRANTED, left, entry}
elseif standing then
  return {BUSY, left, entry, standing, left_of(LEASE, given or tonumber(ARGV[2]))}
elseif good and fresh > 0 then
  return {FOUND, left, entry}  -- due for a refresh, which is impossible now
end
return {REFUSED, left, entry, refusal}
