-- In front of the scripts of locks: who waits, and whose turn it is.
--
-- queue: a sorted set of tokens, by the microsecond of their arrival. homes: for each, when it asked last (in ms), and
-- where its process listens. turn: the token for which the lock is kept just now.
local TURN, LATELY, FENCED = 200, 300, 10000

-- Microseconds of the server's clock.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function leave(queue, homes, token)
  redis.call('ZREM', queue, token)
  redis.call('HDEL', homes, token)
end

-- Keep the lock for the one who has waited longest, and say so where its process listens; its token, or nothing. One
-- that nobody listens for is dead, unless it has asked so lately that it may be about to listen, or has no news.
local function hand_on(queue, homes, turn, channel, now)
  while true do
    local first = redis.call('ZRANGE', queue, 0, 0)[1]
    if not first then
      return
    end
    local asked, home = string.match(redis.call('HGET', homes, first) or '', '^(%d+) (.*)$')
    leave(queue, homes, first)
    if asked then
      local ears = redis.pcall('PUBLISH', channel .. home, first)
      if (type(ears) == 'number' and ears > 0) or now / 1000 - asked < LATELY then
        redis.call('SET', turn, first, 'PX', TURN)
        return first
      end
    end
  end
end

-- The last fence, and the ms for which the lock was granted then.
local function granted(key)
  local fence, ms = string.match(redis.call('GET', key) or '', '^(%d+) ?(%d*)$')
  return tonumber(fence) or 0, tonumber(ms)
end
