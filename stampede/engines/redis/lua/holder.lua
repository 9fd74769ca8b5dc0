-- Return the holders: {number of waiters, the clock's microseconds, and for each holder: token, ms left, fence,
-- holder}.
--
-- KEYS: lock, queue
local told = {redis.call('ZCARD', KEYS[2]), micros}
for _, each in ipairs(loaded().inside) do
  for _, part in ipairs({each.token, each.ends - now, each.fence, each.holder}) do
    told[#told + 1] = part
  end
end
return told
