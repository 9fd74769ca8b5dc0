-- In front of the scripts of locks: who is inside, who waits, and whose turn it is.
--
-- lock: the token of who is alone inside, or '' while some are who have room for others. inside: a sorted set of these,
-- by the ms at which each ends. rooms: another, by how many may be inside as far as each is concerned. terms: for each,
-- its fence and the ms for which it was granted; and, behind an @ before the token, who it is.
-- whose: of one that is alone, its token and who it is. (Older versions read what they have written to its last byte, and
-- would end a lease whose terms have one more word.)
-- queue: a sorted set of tokens, by the microsecond of their arrival. homes: for each, when it asked last (in ms), its
-- room if that is more than 1, when it was called to say that it lives, and where its process listens.
-- turn: the token for which a place is kept just now.
local TURN, LATELY, FENCED, SILENCE, ANSWER = 200, 300, 10000, 2000, 1000

-- Microseconds of the server's clock.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function leave(queue, homes, token)
  redis.call('ZREM', queue, token)
  redis.call('HDEL', homes, token)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- What is about those inside who have room. Each call makes its functions anew: an exclusive lock is spared these.
local number, fits, go, terms_of, stand, first_of
local function roomy()
  function number(text)
    return text == 'inf' and math.huge or tonumber(text)
  end

  -- May one of this room join those inside?
  function fits(its, room)
    local least = number(redis.call('ZRANGE', its.rooms, 0, 0, 'WITHSCORES')[2]) or math.huge
    return redis.call('ZCARD', its.inside) + 1 <= math.min(room, least)
  end

  function go(its, token)
    redis.call('ZREM', its.inside, token)
    redis.call('ZREM', its.rooms, token)
    redis.call('HDEL', its.terms, token, '@' .. token)
  end

  -- The fence of one who is inside, and the ms for which it was granted.
  function terms_of(its, token)
    local fence, ms = string.match(redis.call('HGET', its.terms, token) or '', '^(%d+) (%d+)$')
    return tonumber(fence) or 0, tonumber(ms) or 0
  end

  -- Let one who is inside stand for so many ms from now, and the lock at least for as long. `home`: who it is, if it
  -- has just come.
  function stand(its, token, fence, ms, now, home)
    redis.call('ZADD', its.inside, whole(math.floor(now / 1000) + ms), token)
    if home then
      redis.call('HSET', its.terms, token, whole(fence) .. ' ' .. ms, '@' .. token, home)
    else
      redis.call('HSET', its.terms, token, whole(fence) .. ' ' .. ms)
    end
    if redis.call('PTTL', its.lock) < tonumber(ms) then
      redis.call('SET', its.lock, '', 'PX', ms)
      for _, key in ipairs({its.inside, its.rooms, its.terms}) do
        redis.call('PEXPIRE', key, ms + FENCED)
      end
    end
  end

  -- Those whose time is over go. Who is the first to end of the others, and the ms until then; or nothing: it is free.
  function first_of(its, now)
    now = math.floor(now / 1000)
    for _, token in ipairs(redis.call('ZRANGEBYSCORE', its.inside, '-inf', whole(now))) do
      go(its, token)
    end
    local first = redis.call('ZRANGE', its.inside, 0, 0, 'WITHSCORES')
    if not first[1] then
      redis.call('DEL', its.lock, its.inside, its.rooms, its.terms)
      return
    end
    local _, ms = terms_of(its, first[1])
    if first[2] - now > ms then  -- the server's clock was set back: nobody has more time than he was given
      local longest = 0
      for _, token in ipairs(redis.call('ZRANGE', its.inside, 0, -1)) do
        local _, given = terms_of(its, token)
        redis.call('ZADD', its.inside, whole(now + given), token)
        longest = math.max(longest, given)
      end
      redis.call('PEXPIRE', its.lock, longest)
      first = redis.call('ZRANGE', its.inside, 0, 0, 'WITHSCORES')
    end
    return first[1], first[2] - now
  end
end

-- What is kept of one who waits.
local function noted(now, room, home)
  return whole(now / 1000) .. (room == '1' and '' or '/' .. room) .. ' ' .. home
end

-- Does the first of the queue live, who has to wait for those inside? One that has not asked for so long is called, and
-- is passed over unless somebody listens, and it asks again. Who was passed over, and lives, comes with its arrival.
local function lives(homes, first, entry, channel, now)
  local asked, room, called, home = unpack(entry)
  if math.abs(now / 1000 - asked) < SILENCE then
    return true
  elseif called ~= '' then
    return math.abs(now / 1000 - called) < ANSWER
  end
  local its = room == '' and '' or '/' .. room
  redis.call('HSET', homes, first, asked .. its .. '!' .. whole(now / 1000) .. ' ' .. home)
  local ears = redis.pcall('PUBLISH', channel .. home, first)
  return type(ears) ~= 'number' or ears > 0
end

-- Keep a place for the one who has waited longest, and say so where its process listens; its token, or nothing. One
-- that nobody listens for is dead, unless it has asked so lately that it may be about to listen, or has no news.
-- `its`: those inside, if there are some who have room; nothing and true if the first has to wait for them.
local function hand_on(queue, homes, turn, channel, now, its)
  while true do
    local first = redis.call('ZRANGE', queue, 0, 0)[1]
    if not first then
      return
    end
    local entry = {string.match(redis.call('HGET', homes, first) or '', '^(%d+)/?([^! ]*)!?(%d*) (.*)$')}
    local asked, room, _, home = unpack(entry)
    local full = its and asked and not fits(its, number(room) or 1)
    if full and lives(homes, first, entry, channel, now) then
      return nil, true
    end
    leave(queue, homes, first)
    if asked and not full then
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

-- Let the one who is alone inside stand for so many ms from now. They are noted, or who comes next would take more than
-- the ones before for a clock that was set back.
local function last(lock, fence, ms)
  redis.call('SET', fence, whole(granted(fence)) .. ' ' .. ms, 'PX', ms + FENCED)
  return redis.call('PEXPIRE', lock, ms)
end
