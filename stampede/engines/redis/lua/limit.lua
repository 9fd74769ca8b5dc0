-- One verb of a limit. It decides exactly as window.py, which explains why; tests compare the two.
--
-- KEYS: the window, as window.py's `bytes_of` writes it
-- ARGV: 'take', most, per, span, width, cost, ahead, was: answers {delay, 1 if it is booked, when}
--       'back', cost, when      'rest', most, per, span, for how long: answer {0, 0, 0}
--       'used': answers {now, window}
-- All times in microseconds.
local SECOND, PAIRS = 1000000, 512
local verb = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * SECOND + time[2]
local text = redis.call('GET', KEYS[1]) or ''
if verb == 'used' then
  return {now, text}
end

-- Refuse what window.py refuses: `tonumber` also accepts "inf", "nan" and hexadecimals.
local n, sound = {}, true
for each in string.gmatch(text, '%S+') do
  n[#n + 1] = tonumber(each)
  sound = sound and #each <= 16 and string.match(each, '^-?%d+$')
end
if not sound or #n < 7 or (#n - 7) % 3 ~= 0 or n[1] ~= 1 then
  n = {1, 0, 0, 0, 0, 0, 0}
end
local most, per, long, seen = n[2], n[3], n[4], n[7]
local till, rest = seen + n[5], seen + n[6]
local first, last, cost = {}, {}, {}
local before = seen
for at = 8, #n, 3 do
  before = before + n[at]
  first[#first + 1], last[#last + 1], cost[#cost + 1] = before, before + n[at + 1], n[at + 2]
end

local function keep()
  local parts = {1, most, per, long, math.max(till - seen, 0), math.max(rest - seen, 0), seen}
  local before = seen
  for each = 1, #first do
    parts[#parts + 1] = first[each] - before
    parts[#parts + 1] = last[each] - first[each]
    parts[#parts + 1] = cost[each]
    before = first[each]
  end
  for each = 1, #parts do
    parts[each] = string.format('%.0f', parts[each])
  end
  local ends = math.max(last[#last] or seen, rest, seen) + long - seen
  redis.call('SET', KEYS[1], table.concat(parts, ' '), 'PX', string.format('%.0f', math.ceil(ends / 1000) + 1000))
end

-- A pair without cost blocks nothing.
local function take_out(its, at)
  for each = 1, #first do
    if first[each] <= at and at <= last[each] and cost[each] >= its then
      cost[each] = cost[each] - its
      return each
    end
  end
end

local function remove(each)
  table.remove(first, each)
  table.remove(last, each)
  table.remove(cost, each)
end

if verb == 'back' then
  local mine = take_out(tonumber(ARGV[2]), tonumber(ARGV[3]))
  if mine then
    if cost[mine] == 0 then
      remove(mine)
    end
    keep()
  end
  return {0, 0, 0}
end

-- window.py: _today
local span = tonumber(ARGV[4])
local back = seen - now
if back > SECOND then
  for each = 1, #first do
    first[each], last[each] = first[each] - back, last[each] - back
  end
  till, rest = till - back, rest - back
elseif back > 0 then
  now = seen
end
if span >= long or now >= till then
  long, till = span, now + span
end
seen = now
while first[1] and last[1] + long <= now do
  remove(1)
end

if verb == 'rest' then
  most, per = tonumber(ARGV[2]), tonumber(ARGV[3])
  rest = math.max(rest, seen + ARGV[5])
  keep()
  return {0, 0, 0}
end

local limit, width, its, ahead = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local was, at, till_there = tonumber(ARGV[8]), seen, math.huge
local mine = was > 0 and take_out(its, was)
if 0 < was and was <= seen then
  at, till_there = math.max(was, seen - (span - ARGV[3])), seen
end

-- window.py: _first_free
local low, total = 1, 0
if rest > seen then
  at = rest
end
for high = 1, #first do
  if first[high] > math.max(at, till_there) then
    break
  end
  total = total + cost[high]
  while total - cost[low] + its > limit do
    total = total - cost[low]
    low = low + 1
  end
  if total + its > limit and first[high] - span < at and math.max(first[high], at) < last[low] + span then
    at = last[low] + span
  end
end
local kept = mine and seen < was and was <= at and rest <= was
if kept then
  at = was
end
local delay = math.max(at - seen, 0)
if mine and cost[mine] == 0 and (delay > ahead or not kept) then
  remove(mine)
end
if delay > ahead then
  if back > SECOND or was > 0 then
    keep()
  end
  return {delay, 0, 0}
end

-- window.py: _with, unless the booking is kept
local place = #first
while place > 0 and first[place] > at do
  place = place - 1
end
if kept then
  cost[mine] = cost[mine] + its
elseif place > 0 and at <= math.max(last[place], first[place] + width) then
  last[place], cost[place] = math.max(last[place], at), cost[place] + its
elseif place < #first and last[place + 1] - at <= width then
  first[place + 1], cost[place + 1] = at, cost[place + 1] + its
else
  if #first >= PAIRS then
    if place == 0 or last[2] + span > seen then
      return {delay, 0, 0}
    end
    first[2], cost[2] = first[1], cost[1] + cost[2]
    remove(1)
    place = place - 1
  end
  table.insert(first, place + 1, at)
  table.insert(last, place + 1, at)
  table.insert(cost, place + 1, its)
end
most, per = limit, tonumber(ARGV[3])
keep()
return {delay, 1, at}
