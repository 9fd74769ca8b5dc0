-- Where a script says `-- told`: how those hear of a change whom the server doesn't tell by itself (see news.py).
local function tell(key)
  local listening = redis.pcall('PUBSUB', 'NUMSUB', '{stampede}n')
  if listening[2] and listening[2] > 0 then  -- or a cluster would send it to all of its servers, for nobody
    redis.pcall("PUBLISH", '{stampede}n', key)
  end
end
