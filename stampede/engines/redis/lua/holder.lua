-- Who is inside: {token, ms left, ...}.
--
-- KEYS: lock, inside
local holder = glance(KEYS[1])
if not holder then
  return {}
end
if holder ~= '' then
  return {holder, redis.call('PTTL', KEYS[1])}
end
local told, now = {}, math.floor(clock() / 1000)
for _, token in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local left = redis.call('ZSCORE', KEYS[2], token) - now
  if left > 0 then
    told[#told + 1], told[#told + 2] = token, left
  end
end
return told
