-- Functions: put a request into its queue; wake a worker that found nothing to pull.
local function enqueue(q, class, tenant, item, tokens, side)
  redis.call(side, q .. ':' .. class .. ':' .. tenant, item)
  redis.call('HINCRBY', q .. '{SUMS}', class .. ':' .. tenant, tokens)
  redis.call('HINCRBY', q .. '{SUMS}', '*', tokens)
  redis.call('HINCRBY', q .. '{SUMS}', 'n', 1)
  local active, idle = q .. ':' .. class, q .. ':' .. class .. '{LATELY}'
  if redis.call('ZSCORE', active, tenant) then return end
  local floor = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')[2]
    or redis.call('HGET', q .. '{SUMS}', 'floor:' .. class) or '0'
  local own = redis.call('ZSCORE', idle, tenant)
  if own then
    redis.call('ZREM', idle, tenant)
    if tonumber(own) > tonumber(floor) then floor = own end
  end
  redis.call('ZADD', active, floor, tenant)
end

local function wake(pool, q)
  for _ = 1, 3 do
    local worker = redis.call('ZPOPMAX', q .. '{IDLE}')[1]
    if not worker then return end
    if redis.call('EXISTS', {worker_key(pool, worker)}) == 1 then
      redis.call('XADD', {control_key(pool, worker)}, 'MAXLEN', '~',
        {CONTROL_STREAM_MAX_LEN}, '*', 'm', '{"action":"poke"}')
      return
    end
  end
end
