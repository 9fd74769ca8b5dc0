-- Whether there is still something to wait for: this token is inside, or has the turn; or, of one in the queue, its own
-- turn is yet to come, whoever is inside meanwhile. (Only who is told leaves the queue, and a lock that is free tells
-- nobody.)
--
-- KEYS: lock, turn, queue, homes, inside, rooms   ARGV: token, the one in the queue ('' if it has no place)
local holder, turn = glance(KEYS[1]), glance(KEYS[2])
if holder == '' then  -- some are inside: is there room for the first, and nobody called?
  roomy()
  local now = clock()
  local gone = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', whole(math.floor(now / 1000)), 'LIMIT', 0, 1)[1]
  if gone then
    return 0
  end
  if ARGV[2] == '' then
    return (turn == ARGV[1] or redis.call('ZSCORE', KEYS[5], ARGV[1])) and 1 or 0
  end
  local first = not turn and redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if first then
    local room = string.match(redis.call('HGET', KEYS[4], first) or '', '^%d+/?([^! ]*)')
    if fits({inside = KEYS[5], rooms = KEYS[6]}, number(room) or 1) then
      return 0
    end
  end
end
holder = holder or turn
if ARGV[2] ~= '' then
  return holder and redis.call('ZSCORE', KEYS[3], ARGV[2]) and 1 or 0
end
return holder == ARGV[1] and 1 or 0
