-- Decide about a request: its tenant's limits, its budgets, the queue, its place. See
-- `controlplane.usage.limits.admit`.
-- KEYS job | ARGV pool, queue, request id, job, tenant, class, digests, deadline, its ttl, gateway,
-- tokens to read, tokens to write (as limits count them; as a budget must), tokens a second of the
-- pool, seconds that one may wait, what may wait in all, of a tenant, number of policies,
-- per policy (key, requests/min, tokens/min, concurrent, waiting), 0: no such limit,
-- per budget (key, hard limit, soft limit), -1: no such limit; 0 allows nothing
-- -> ok, limit, remaining, seconds to full of requests, of tokens, index of a passed soft budget
-- -> why not, index of the policy or budget, seconds to wait, the limit
redis.replicate_commands()
--#include enqueue

local job = KEYS[1]
if redis.call('EXISTS', job) == 1 then return {'ok'} end
local pool, q, id, tenant, class = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local prompt, output = tonumber(ARGV[11]), tonumber(ARGV[12])
local tokens, reserve = prompt + output, prompt + tonumber(ARGV[13])
local num_policies = tonumber(ARGV[18])
local hold, waits, writes = {}, {}, {}
local tightest = {requests = nil, tokens = nil}

local function refuse(why, index, seconds, limit)
  return {why, index, string.format('%.3f', seconds), tostring(limit)}
end

-- One more of `amount` against a bucket of `limit` a minute that is full again at `full`.
local function pour(kind, key, field, full, limit, amount)
  local period = 60 / limit
  amount = math.min(amount, limit)
  local later = math.max(tonumber(full or 0), now) + amount * period
  local excess = later - now - 60
  if excess > 1e-6 then return excess end
  writes[#writes + 1] = {key, field, string.format('%.6f', later)}
  if kind == 'tokens' then
    hold[#hold + 1] = string.format('rate %s %.9f %d\n', key, period, amount)
  end
  local left = math.floor((60 - (later - now)) / period + 1e-6)
  if not tightest[kind] or left < tightest[kind][2] then
    tightest[kind] = {limit, left, string.format('%.3f', later - now)}
  end
end

for i = 1, num_policies do
  local at = 18 + (i - 1) * 5
  local key, rpm, tpm = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local concurrent, waiting = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local full = {false, false}
  if rpm > 0 or tpm > 0 then full = redis.call('HMGET', key, 'r', 't') end
  local excess = rpm > 0 and pour('requests', key, 'r', full[1], rpm, 1)
  if excess then return refuse('requests', i, excess, rpm) end
  excess = tpm > 0 and pour('tokens', key, 't', full[2], tpm, tokens)
  if excess then return refuse('tokens', i, excess, tpm) end
  if concurrent > 0 then
    redis.call('ZREMRANGEBYSCORE', key .. ':run', '-inf', now)
    if redis.call('ZCARD', key .. ':run') >= concurrent then
      return refuse('concurrent', i, 1, concurrent)
    end
    hold[#hold + 1] = 'run ' .. key .. ':run 0 0\n'
  end
  if waiting > 0 then
    redis.call('ZREMRANGEBYSCORE', key .. '{WAITING}', '-inf', now)
    if redis.call('ZCARD', key .. '{WAITING}') >= waiting then
      return refuse('waiting', i, 1, waiting)
    end
    waits[#waits + 1] = key .. '{WAITING}'
  end
end

local soft = 0
local first_budget = 18 + num_policies * 5
for at = first_budget, #ARGV - 3, 3 do
  local key, hard, warn = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local index = (at - first_budget) / 3 + 1
  local spent, reserved = unpack(redis.call('HMGET', key, 'spent', 'reserved'))
  if not spent then return refuse('unknown', index, 0, hard) end
  local sum = spent + (reserved or 0) + reserve
  if hard >= 0 and sum > hard then return refuse('budget', index, 0, hard) end
  if warn >= 0 and sum > warn then soft = index end
  hold[#hold + 1] = string.format('budget %s 0 %d\n', key, reserve)
end

for digest in string.gmatch(ARGV[7], '[^,]+') do
  if redis.call('HEXISTS', {quarantine_key(pool)}, digest) == 1 then
    return refuse('quarantined', 0, 0, 0)
  end
end

local own, all, number = unpack(
  redis.call('HMGET', q .. '{SUMS}', class .. ':' .. tenant, '*', 'n'))
if tonumber(number or 0) >= tonumber(ARGV[16]) then return refuse('pool', 0, 10, ARGV[16]) end
if redis.call('LLEN', q .. ':' .. class .. ':' .. tenant) >= tonumber(ARGV[17]) then
  return refuse('waiting', 0, 5, ARGV[17])
end
local rate, patience = tonumber(ARGV[14]), tonumber(ARGV[15])
if rate > 0 and tonumber(all or 0) > 0 then
  -- Served in turn with the others, its own backlog goes at this share of the pool's speed.
  local sharing = redis.call('ZCARD', q .. ':' .. class) + (own and 0 or 1)
  local wait = ((own or 0) + output) * sharing / rate
  if wait > patience then
    return refuse(own and 'tenant_wait' or 'pool_wait', 0, wait - patience, patience)
  end
end

for _, write in ipairs(writes) do
  redis.call('HSET', write[1], write[2], write[3])
  redis.call('EXPIRE', write[1], 120)
end
local deadline = tonumber(ARGV[8])
for _, line in ipairs(hold) do
  local kind, key, _, reserved = string.match(line, '(%S+) (%S+) (%S+) (%S+)')
  if kind == 'run' then
    redis.call('ZADD', key, deadline + 60, id)
    redis.call('EXPIRE', key, ARGV[9])
  elseif kind == 'budget' then
    redis.call('HINCRBY', key, 'reserved', reserved)
  end
end
for _, key in ipairs(waits) do
  redis.call('ZADD', key, deadline, id)
  redis.call('EXPIRE', key, ARGV[9])
end
local item = id .. ' ' .. output .. ' ' .. ARGV[7]
redis.call('HSET', job, 'state', 'queued', 'lease', 0, 'seq', 0, 'gateway', ARGV[10], 'm', ARGV[4],
  'q', q, 'class', class, 'tenant', tenant, 'item', item, 'tokens', output,
  'cost', prompt + {OUTPUT_WEIGHT} * output, 'deadline', deadline, 'hold', table.concat(hold),
  'waits', table.concat(waits, ' '), 'since', string.format('%.3f', now))
redis.call('EXPIRE', job, ARGV[9])
redis.call('SADD', {queues_key(pool)}, q)
enqueue(q, class, tenant, item, output, 'RPUSH')
wake(pool, q)
local r, t = tightest.requests or {0, 0, '0'}, tightest.tokens or {0, 0, '0'}
return {'ok', r[1], r[2], r[3], t[1], t[2], t[3], soft}
