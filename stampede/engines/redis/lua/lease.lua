-- Where a script says `-- lease`: what a lease's key holds, and how it is cut and prolonged.

-- What a lease's key holds (and a rest's): the token, and for how many ms it was given.
local function noted(token, ms)
  return token .. struct.pack('>d', ms)
end

-- The token, those ms, and the token with whose it is behind it. Somebody else's bytes are a token of their own.
local function token_of(value)
  local given = value and #value > 8 and struct.unpack('>d', string.sub(value, -8))
  if given and given >= 1 and given < 1e15 then
    value = string.sub(value, 1, -9)
    if string.sub(value, 9, 9) == '@' then
      return string.sub(value, 1, 8), given, value
    end
    return value, given, value
  end
  return value, nil, value
end

-- The ms that are left of a key which was given that many: no more than those.
local function left_of(key, given)
  local left = redis.call('PTTL', key)
  if left < 0 or left > given then
    left = given
    redis.pcall('PEXPIRE', key, left)
  end
  return left
end

-- Let a lease stand for so long from now; it was given `given`. `token`: with whose it is behind it.
local function prolong(key, token, ms, given)
  if given == tonumber(ms) then
    return redis.call('PEXPIRE', key, ms)
  end
  redis.call('SET', key, noted(token, ms), 'PX', ms)
  return 1
end
