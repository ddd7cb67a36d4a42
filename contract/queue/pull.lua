-- Take requests from the fair queue into a worker's inbox.
-- KEYS queue, inbox, residents | ARGV pool, worker, boot, how many, group
-- -> (inbox entry, job, lease, attempt, cancel) …
--
-- Requests that were cancelled or are too late come too, beyond the count and free of charge: the
-- worker ends them, so that every request ends in one way.
redis.replicate_commands()
local q, inbox = KEYS[1], KEYS[2]
local pool, worker, boot, group = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local want = tonumber(ARGV[4])
local taken, seen, pulled = 0, 0, {}
-- A later run has this worker's id, and its inbox.
if (redis.call('HGET', {worker_key(pool, worker)}, 'boot') or boot) ~= boot then return {} end
if redis.call('EXISTS', inbox) == 0 then
  redis.call('XGROUP', 'CREATE', inbox, group, '0', 'MKSTREAM')
end

local function is_resident(item)
  local digests = string.match(item, '%S+ %S+ (.*)')
  if digests == '' then return true end
  for digest in string.gmatch(digests, '[^,]+') do
    if redis.call('SISMEMBER', KEYS[3], digest) == 0 then return false end
  end
  return true
end

local function window(active)
  local found, tenants = redis.call('ZRANGE', active, 0, {AFFINITY_WINDOW} - 1, 'WITHSCORES'), {}
  for i = 1, #found, 2 do
    tenants[#tenants + 1] = {id = found[i], counter = tonumber(found[i + 1])}
  end
  return tenants
end

local function head(class, tenant)
  if tenant.item == nil then
    tenant.item = redis.call('LINDEX', q .. ':' .. class .. ':' .. tenant.id, 0)
    tenant.resident = tenant.item and is_resident(tenant.item)
  end
  return tenant.item
end

-- The least served tenant, or one near it whose adapter is here already.
local function choose(class, tenants)
  head(class, tenants[1])
  if #tenants == 1 or not tenants[1].item or tenants[1].resident then return 1 end
  local skips = q .. ':' .. class .. '{SKIPS}'
  if tonumber(redis.call('HGET', skips, tenants[1].id) or 0) >= {MAX_SKIPS} then return 1 end
  for i = 2, #tenants do
    if head(class, tenants[i]) and tenants[i].resident then
      for j = 1, i - 1 do
        if tonumber(redis.call('HINCRBY', skips, tenants[j].id, 1)) > {MAX_SKIPS} then
          redis.call('HINCRBY', skips, tenants[j].id, -1)
        end
      end
      return i
    end
  end
  return 1
end

-- Its job goes into the inbox; 0 when nobody waits for it any more.
local function dispatch(item)
  local id = string.match(item, '%S+')
  local job = {job_key(pool, id)}
  local m, lease, attempt, cancel, deadline, cost, waits, state = unpack(redis.call('HMGET',
    job, 'm', 'lease', 'attempt', 'cancel', 'deadline', 'cost', 'waits', 'state'))
  if not m or state ~= 'queued' then return 0 end
  for key in string.gmatch(waits or '', '%S+') do redis.call('ZREM', key, id) end
  local is_over = cancel or tonumber(deadline) < now
  lease, attempt = tonumber(lease) + 1, tonumber(attempt or 0) + 1
  redis.call('HSET', job, 'state', 'running', 'worker', worker, 'boot', boot, 'seq', 0,
    'lease', lease, 'attempt', attempt, 'charged', is_over and 0 or cost)
  local entry = redis.call('XADD', inbox, '*', 'm', m)
  pulled[#pulled + 1] = {entry, m, lease, attempt, cancel and 1 or 0}
  if is_over then return 0 end
  taken = taken + 1
  return tonumber(cost)
end

local function serve(class, count)
  local active = q .. ':' .. class
  local tenants = window(active)
  if tenants[1] then
    redis.call('HSET', q .. '{SUMS}', 'floor:' .. class, string.format('%.17g', tenants[1].counter))
    redis.call('ZREMRANGEBYSCORE', active .. '{LATELY}', '-inf',
      '(' .. string.format('%.17g', tenants[1].counter))
  end
  local until_taken = taken + count
  while taken < until_taken and seen < 64 do
    if not tenants[1] then tenants = window(active) end
    if not tenants[1] then return end
    local at = choose(class, tenants)
    local tenant = tenants[at]
    local waiting = active .. ':' .. tenant.id
    local item = redis.call('LPOP', waiting)
    seen = seen + 1
    if item then
      local tokens = string.match(item, '%S+ (%S+)')
      local cost = dispatch(item)
      redis.call('HDEL', active .. '{SKIPS}', tenant.id)
      redis.call('HINCRBY', q .. '{SUMS}', 'n', -1)
      if tonumber(tokens) > 0 then  -- "-0" is no integer to Redis
        redis.call('HINCRBY', q .. '{SUMS}', '*', -tokens)
        redis.call('HINCRBY', q .. '{SUMS}', class .. ':' .. tenant.id, -tokens)
      end
      tenant.counter = tenant.counter + cost
    end
    table.remove(tenants, at)
    if redis.call('EXISTS', waiting) == 0 then
      redis.call('ZREM', active, tenant.id)
      redis.call('HDEL', q .. '{SUMS}', class .. ':' .. tenant.id)
      redis.call('ZADD', active .. '{LATELY}', string.format('%.17g', tenant.counter), tenant.id)
    else
      redis.call('ZADD', active, string.format('%.17g', tenant.counter), tenant.id)
      -- It stays in view unless others beyond it may come first now.
      local place = 1
      while tenants[place] and tenants[place].counter <= tenant.counter do place = place + 1 end
      if tenants[place] then
        tenant.item = nil
        table.insert(tenants, place, tenant)
      end
    end
  end
end

local has_both = redis.call('EXISTS', q .. ':{INTERACTIVE}', q .. ':{BATCH}') == 2
-- Of the dispatches, not of the pulls: who takes many at a time passes the batch class's turn.
if has_both and redis.call('HINCRBY', q .. '{SUMS}', 'turn', want) % {BATCH_SHARE} < want then
  serve('{BATCH}', 1)
end
if taken < want then serve('{INTERACTIVE}', want - taken) end
if taken < want then serve('{BATCH}', want - taken) end
if #pulled == 0 then
  redis.call('ZADD', q .. '{IDLE}', now, worker)
  redis.call('ZREMRANGEBYSCORE', q .. '{IDLE}', '-inf', now - 60)
end
if #pulled > 0 then
  redis.call('SADD', {inboxes_key(pool)}, worker)
  redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', #pulled, 'STREAMS', inbox, '>')
end
return pulled
