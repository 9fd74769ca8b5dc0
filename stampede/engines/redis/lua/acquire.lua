-- Take the lock, or return its holder and take a place in the queue.
--
-- KEYS: lock, queue, notes of waiters
-- ARGV: token, lease in ms, room, holder, channel, where this process listens ('' if this caller won't wait), ms for
-- which the queue is kept, the highest fence that this process has seen
-- Answers {1, fence} or {0, token, ms left, number of waiters before this one}.
local token, lease, room, home = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]) or math.huge, ARGV[6]
local its = loaded('GET')
local mine = its.inside[place_of(its, token)]
if mine then  -- sent again, since its reply was lost
  mine.ends, mine.lease = now + lease, lease
  save(its)
  return {1, mine.fence}
end

local function queue()
  local note = redis.call('HGET', KEYS[3], token)
  local arrival = note and cmsgpack.unpack(note)
  if not arrival then
    local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
    arrival = math.max(micros, (last or 0) + 1)
  end
  redis.call('ZADD', KEYS[2], whole(arrival), token)
  redis.call('HSET', KEYS[3], token, cmsgpack.pack(arrival, now, room, home))
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
  redis.call('PEXPIRE', KEYS[3], ARGV[7])
  its.queued = true
end

if its.queued or its.turn then
  if home ~= '' and its.turn ~= token then
    queue()
  end
  call_next(its, ARGV[5])
end
local called = its.turn == token
if (called or not (its.turn or its.queued)) and fits(its, room) then
  -- The clock makes fences grow even after the lock was evicted or flushed. What this process has seen makes them grow
  -- after the clock was set back, or on another server.
  its.fence = math.max(its.fence + 1, micros, ARGV[8] + 1)
  its.inside[#its.inside + 1] = {
    token = token, ends = now + lease, lease = lease, room = room, fence = its.fence, holder = ARGV[4]
  }
  if called then
    its.turn = nil
    leave(token)
  end
  if room > 1 then  -- there may be room for the next
    call_next(its, ARGV[5])
  end
  save(its)
  return {1, its.fence}
end

if home ~= '' and not its.queued then
  queue()
end
save(its)
local holder, ends = its.turn, its.turn and its.till
for _, each in ipairs(its.inside) do
  if not ends or each.ends < ends then
    holder, ends = each.token, each.ends
  end
end
return {0, holder, ends - now, home ~= '' and redis.call('ZRANK', KEYS[2], token) or 0}
