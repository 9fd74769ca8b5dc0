-- Put in front of the scripts of locks: the holders, the waiters, and whose turn it is. It decides as room.py, which
-- explains why; a test compares the two. An exclusive lock is a room for one.
--
-- KEYS[1], the lock, packed: `inside`, for each token its end (in ms), the ms of its lease, its room, its fence and its
-- holder; `turn`, the token that was called, until `till`; `fence`, the last one; `done`, the last releases; `queued`,
-- whether there may be waiters. It outlives the holders, so that fences go on growing.
-- KEYS[2], the queue: a sorted set of tokens, by the microsecond of their arrival.
-- KEYS[3], for each waiter, packed: its arrival, when it last asked (in ms), its room, and where its process listens.
-- One that was called, or passed over, has left the queue, but its arrival is still here: if it asks again it is first.
local TURN, LATELY, SILENCE, FENCED = 200, 300, 40000, 10000

local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = math.floor(micros / 1000)
local lapsed = false  -- whether a lease has ended by itself

local function whole(number)
  return string.format('%.0f', number)
end

-- GETEX counts as a write, so later writes succeed even if memory is full. A caller that enters reads by GET.
local function loaded(command)
  local raw = redis.call(command or 'GETEX', KEYS[1])
  local sound, its = pcall(cmsgpack.unpack, raw or '')
  if not (sound and type(its) == 'table' and its.inside) then
    return {inside = {}, fence = 0, done = ''}
  end
  local inside = {}
  for _, each in ipairs(its.inside) do
    each.ends = math.min(each.ends, now + each.lease)  -- a clock that was set back gives no holder more time
    if each.ends > now then
      inside[#inside + 1] = each
    end
  end
  lapsed = #inside < #its.inside
  its.inside = inside
  if its.turn and (its.till <= now or its.till > now + TURN) then
    its.turn = nil
  end
  return its
end

local function save(its)
  local ends = now
  for _, each in ipairs(its.inside) do
    ends = math.max(ends, each.ends)
  end
  redis.call('SET', KEYS[1], cmsgpack.pack(its), 'PX', whole(ends - now + FENCED))
end

local function place_of(its, token)
  for number, each in ipairs(its.inside) do
    if each.token == token then
      return number
    end
  end
end

-- Return whether a caller with this room may join those inside.
local function fits(its, room)
  for _, each in ipairs(its.inside) do
    room = math.min(room, each.room)
  end
  return #its.inside < room
end

local function leave(token)
  redis.call('ZREM', KEYS[2], token)
  redis.call('HDEL', KEYS[3], token)
end

-- Call the first of the queue if it may enter: its place is kept for a moment, and its process notified. A process that
-- does not listen is dead, unless it asked so lately that it may be about to listen, or may not listen at all. A waiter
-- that has no room yet, and has not asked for longer than any waiter sleeps, does not block the others.
local function call_next(its, channel)
  while its.queued and not its.turn do
    local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
    if not first then
      its.queued = nil
      return
    end
    local note, lives, may = redis.call('HGET', KEYS[3], first), false, false
    if note then
      local _, asked, room, home = cmsgpack.unpack(note)
      local since = math.abs(now - asked)
      may = fits(its, room)
      if may then
        local ears = redis.pcall('PUBLISH', channel .. home, first)
        lives = type(ears) == 'number' and ears > 0 or since < LATELY
      else
        local ears = redis.pcall('PUBSUB', 'NUMSUB', channel .. home)[2] or 1
        lives = since < (ears > 0 and SILENCE or LATELY)
      end
    end
    if lives and not may then
      return
    end
    redis.call('ZREM', KEYS[2], first)
    if lives then
      its.turn, its.till = first, now + TURN
    end
  end
end
