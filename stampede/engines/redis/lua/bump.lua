-- Begin a new generation, and note the ended one for as long as a process may believe it.
--
-- KEYS: generation, note   ARGV: a new id, ms for which an ended one is noted, most to note

local old = string.match(glance(KEYS[1]) or '', '^%w+')
redis.call('SET', KEYS[1], ARGV[1])
if not old or old == ARGV[1] then  -- none to note, or the same call sent again
  return 1
end
local time = redis.pcall('TIME')  -- without the right to ask, all noted ones stay as long as the last
local now = time.err and 0 or time[1] * 1000 + math.floor(time[2] / 1000)
local ended = {old .. '@' .. string.format('%.0f', now)}
for id, at in string.gmatch(glance(KEYS[2]) or '', '(%w+)@(%d+)') do
  if now - at < tonumber(ARGV[2]) and #ended < tonumber(ARGV[3]) then
    ended[#ended + 1] = id .. '@' .. at
  end
end
redis.call('SET', KEYS[2], table.concat(ended, ' '), 'PX', ARGV[2])
return 1
