-- Who is inside: {how many wait, the clock's microseconds, and of each: token, ms left, fence, who it is}.
--
-- KEYS: lock, inside, fence, terms, queue, whose
local now = clock()
local told = {redis.call('ZCARD', KEYS[5]), now}

local function tell(...)
  for _, each in ipairs({...}) do
    told[#told + 1] = each
  end
end

local holder = glance(KEYS[1])
if holder == '' then
  roomy()
  for _, token in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local left = redis.call('ZSCORE', KEYS[2], token) - math.floor(now / 1000)
    local fence = terms_of({terms = KEYS[4]}, token)
    if left > 0 then
      tell(token, left, fence, redis.call('HGET', KEYS[4], '@' .. token) or '')
    end
  end
elseif holder then
  local fence, whose = granted(KEYS[3]), glance(KEYS[6]) or ''
  local its = string.sub(whose, 1, #holder + 1) == holder .. ' '  -- an older version's holder writes none
  tell(holder, redis.call('PTTL', KEYS[1]), fence, its and string.sub(whose, #holder + 2) or '')
end
return told
