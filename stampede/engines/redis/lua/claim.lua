-- The value, or the right to compute it, decided in one step. Durations in ms.
--
-- KEYS: entry, lease, past, rest
-- ARGV: token, lease, since, seen, awaited, force, draw, channel
-- Answers {what, ms left of the entry's key, entry, and: busy: token, ms left / failed: verdict, ms of rest}
local FOUND, GRANTED, BUSY, FAILED = 0, 1, 2, 3
local token, force = ARGV[1], ARGV[6] == '1'

local entry, left, fresh, keep, id, cost, margin, ttl = look(KEYS[1])
if entry and not force and id ~= ARGV[4] and fresh > -ARGV[3] then
  -- The early draw: an entry that is due is not good enough, but is kept.
  if ARGV[7] == '' or fresh > 1000 * math.min(margin + ARGV[7] * cost, ttl / 2) then
    return {FOUND, left, entry}
  end
end
if not entry or keep <= 0 then
  entry, left = false, -2
end

if not force then
  local verdict = ARGV[5] ~= '' and redis.call('HGET', KEYS[3], ARGV[5])
  local rest = redis.call('PTTL', KEYS[4])
  if verdict or rest > 0 then
    return {FAILED, left, entry, verdict or redis.call('GET', KEYS[4]), math.max(rest, 0)}
  end
end

local standing = glance(KEYS[2])
if standing and standing ~= token and not force then
  return {BUSY, left, entry, standing, redis.call('PTTL', KEYS[2])}
end
redis.call('SET', KEYS[2], token, 'PX', ARGV[2])
if standing and standing ~= token then
  wake(ARGV[8], '')
end
return {GRANTED, left, entry}
