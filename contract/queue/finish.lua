-- A function: give back what a request held: its share of the queue by exact counts, its limits,
-- its budgets.
local function finish(job, request_id, prompt, output)
  local q, class, tenant, charged, hold = unpack(redis.call('HMGET', job,
    'q', 'class', 'tenant', 'charged', 'hold'))
  if not q then return end
  local active, idle = q .. ':' .. class, q .. ':' .. class .. '{LATELY}'
  local more = prompt + {OUTPUT_WEIGHT} * output - (tonumber(charged) or 0)
  if redis.call('ZSCORE', active, tenant) then
    redis.call('ZINCRBY', active, more, tenant)
  else
    if not redis.call('ZSCORE', idle, tenant) then
      local floor = redis.call('HGET', q .. '{SUMS}', 'floor:' .. class) or '0'
      redis.call('ZADD', idle, floor, tenant)
    end
    redis.call('ZINCRBY', idle, more, tenant)
  end
  local used = prompt + output
  for kind, key, rate, reserved in string.gmatch(hold or '', '(%S+) (%S+) (%S+) (%S+)\n') do
    if kind == 'run' then
      redis.call('ZREM', key, request_id)
    elseif kind == 'rate' and redis.call('HEXISTS', key, 't') == 1 then
      redis.call('HINCRBYFLOAT', key, 't', string.format('%.9f', (used - reserved) * rate))
    elseif kind == 'budget' and redis.call('EXISTS', key) == 1 then
      if tonumber(reserved) > 0 then redis.call('HINCRBY', key, 'reserved', -reserved) end
      redis.call('HINCRBY', key, 'spent', used)
    end
  end
end
