-- Inserted where a script says `-- lease`: the value of a lease's key, and how it is cut and prolonged.

-- Return the value of a lease's key, or a rest's: the token, and the ms it was given.
local function noted(token, ms)
  return token .. struct.pack('>d', ms)
end

-- Return the token, those ms, and the token with its holder. Foreign bytes count as a token of their own.
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

-- Return the ms left of a key that was given this many: never more.
local function left_of(key, given)
  local left = redis.call('PTTL', key)
  if left < 0 or left > given then
    left = given
    redis.pcall('PEXPIRE', key, left)
  end
  return left
end

-- Make a lease end in `ms` from now. It was `given` that many before. `token` includes the holder.
local function prolong(key, token, ms, given)
  if given == tonumber(ms) then
    return redis.call('PEXPIRE', key, ms)
  end
  redis.call('SET', key, noted(token, ms), 'PX', ms)
  return 1
end
