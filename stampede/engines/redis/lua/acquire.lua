-- Enter, or say who is inside, and take a place in the queue. Who came first is first, however the lock came free.
--
-- KEYS: lock, fence, queue, homes, turn, inside, rooms, terms, whose
-- ARGV: token, lease in ms, channel, where this process listens ('' if this caller won't wait), its arrival ('' if this
-- is the first time it asks), ms for which the queue is kept, its room, who it is, the highest fence that this process
-- has seen
-- Answers {1, fence} or {0, token, ms left, arrival, how many are before it}.
local token, home, now = ARGV[1], ARGV[4], clock()
local fence, length = granted(KEYS[2])
local holder, its = redis.call('GET', KEYS[1])
if holder == token then
  last(KEYS[1], KEYS[2], ARGV[2])
  redis.call('SET', KEYS[9], token .. ' ' .. ARGV[8], 'PX', ARGV[2])
  return {1, fence}
end
if holder == '' or ARGV[7] ~= '1' then
  roomy()
  its = {lock = KEYS[1], inside = KEYS[6], rooms = KEYS[7], terms = KEYS[8]}
end
local some, rest
if holder == '' then
  holder, rest = first_of(its, now)
  some = holder and its
  if some and redis.call('ZSCORE', its.inside, token) then
    local mine = terms_of(its, token)
    stand(its, token, mine, ARGV[2], now, ARGV[8])
    return {1, mine}
  end
end
local called, full
if some or not holder then
  called = redis.call('GET', KEYS[5])
  if not called then  -- somebody's lease ended, or the one whose turn it was didn't come
    if home ~= '' and ARGV[5] ~= '' then
      redis.call('ZADD', KEYS[3], 'NX', ARGV[5], token)
      redis.call('HSET', KEYS[4], token, noted(now, ARGV[7], home))
    end
    called, full = hand_on(KEYS[3], KEYS[4], KEYS[5], ARGV[3], now, some)
  end
  if (called == token or not (called or full)) and (not some or fits(its, number(ARGV[7]))) then
    -- The clock keeps it growing over a counter that has ended, was evicted or flushed; and what this process has seen,
    -- over a clock that was set back since, or is another server's.
    fence = whole(math.max(fence + 1, now, tonumber(ARGV[9]) + 1))
    local kept = ARGV[2] + FENCED
    if ARGV[7] == '1' then
      redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
      redis.call('SET', KEYS[9], token .. ' ' .. ARGV[8], 'PX', ARGV[2])
    else
      kept = math.max(kept, redis.call('PTTL', KEYS[2]))
      if not some then
        redis.call('DEL', its.lock, its.inside, its.rooms, its.terms)
      end
      redis.call('ZADD', its.rooms, ARGV[7], token)
      stand(its, token, fence, ARGV[2], now, ARGV[8])
    end
    redis.call('SET', KEYS[2], fence .. ' ' .. ARGV[2], 'PX', kept)
    if called then  -- else nobody waits: the queue is empty, and no place is kept
      redis.call('DEL', KEYS[5])
      leave(KEYS[3], KEYS[4], token)
    end
    if ARGV[7] ~= '1' then  -- the next may follow
      hand_on(KEYS[3], KEYS[4], KEYS[5], ARGV[3], now, its)
    end
    return {1, tonumber(fence)}
  end
end

if some then
  rest = called and math.min(rest, redis.call('PTTL', KEYS[5])) or rest
elseif holder then
  rest = redis.call('PTTL', KEYS[1])
  if length and rest > length then  -- the server's clock was set back
    redis.call('PEXPIRE', KEYS[1], length)
    rest = length
  end
else
  holder, rest = called, redis.call('PTTL', KEYS[5])
end
if home == '' then
  return {0, holder, rest, 0, 0}
end
local arrival = tonumber(ARGV[5])
if not arrival then
  local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
  arrival = math.max(now, (tonumber(last) or 0) + 1)
end
redis.call('ZADD', KEYS[3], 'NX', whole(arrival), token)
redis.call('HSET', KEYS[4], token, noted(now, ARGV[7], home))
redis.call('PEXPIRE', KEYS[3], ARGV[6])
redis.call('PEXPIRE', KEYS[4], ARGV[6])
return {0, holder, rest, arrival, redis.call('ZRANK', KEYS[3], token)}
