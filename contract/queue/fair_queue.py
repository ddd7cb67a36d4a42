"""The fair queue's keys, and the Lua that several kinds of process run. Standard library only.

Requests wait per base model, class and tenant, and a worker with room pulls those of the tenants
that have been served least. "Served" is a virtual counter of tokens (Sheng et al., "Fairness in
Serving Large Language Models", 2024): charged when a request is dispatched, corrected when it
ends. A tenant that becomes active starts no lower than the lowest active one, so that nobody saves
up a right to the whole pool by being idle.

    key (`q` is `queue_key(pool, base model)`)   type    what
    q:<class>               zset    tenant -> counter, of the tenants that have something waiting
    q:<class>:vt            zset    tenant -> counter, of the others that were served lately
    q:<class>:<tenant>      list    "<request id> <tokens> <digest,…>", the next first
    q:<class>:skip          hash    tenant -> times another was preferred for its adapter
    q:sums                  hash    waiting tokens by "<class>:<tenant>"; "*" tokens and "n"
                                    requests of all; "floor:<class>", the lowest counter then
    q:idle                  zset    workers that found nothing -> when
    res:{p}:<worker>        set     digests in that worker's memory, as of its last heartbeat
    lim:{p}:<tenant>:<id>   hash    one policy's rates: `r`, `t`, times at which they are full again
    qs:{p}                  set     the queues that something was put into
    srv:{p}                 zset    queue -> when a worker of its base model was last heard of
    reap:{p}                hash    when a reaper last looked, and `since` when without a break
    quar:{p}                hash    adapter digest -> when it was found to end workers
    in:{p}                  set     workers whose inboxes may hold something
    lim:…:run, lim:…:wait   zset    requests of a policy that run or wait -> their deadline
    bud:{p}:<tenant>:<id>:… hash    one budget's period: tokens `spent` and `reserved`

Further fields of the job hash: `m` the job, `q`, `class`, `tenant`, `item` (as in the list),
`tokens` (those it may generate), `cost` (charged at dispatch), `charged`, `deadline`, `hold` (what
its end gives back: lines of "run|rate|budget key seconds-per-token reserved-tokens"), `waits`
(zsets to leave at dispatch).
"""

from __future__ import annotations

from contract.protocol import CONTROL_STREAM_MAX_LEN, DEAD_LETTER_MAX_LEN, MAX_ATTEMPTS

INTERACTIVE = "i"
BATCH = "b"

#: A generated token weighs as much as so many read ones.
OUTPUT_WEIGHT = 2
#: Among so many of the least served tenants a worker looks for an adapter that it has.
AFFINITY_WINDOW = 16
#: How often in a row a tenant may be passed over so.
MAX_SKIPS = 4
#: Requests of one pull: what keeps the script short.
PULL_COUNT = 4
#: While both classes wait, one dispatch in so many is of the batch class.
BATCH_SHARE = 16


def queue_key(pool: str, base_model: str) -> str:
    return f"q:{{{pool}}}:{base_model}"


def residents_key(pool: str, worker_id: str) -> str:
    return f"res:{{{pool}}}:{worker_id}"


def inboxes_key(pool: str) -> str:
    return f"in:{{{pool}}}"


def queues_key(pool: str) -> str:
    return f"qs:{{{pool}}}"


def served_key(pool: str) -> str:
    return f"srv:{{{pool}}}"


def quarantine_key(pool: str) -> str:
    return f"quar:{{{pool}}}"


def limit_key(pool: str, tenant_id: str, policy_id: str) -> str:
    return f"lim:{{{pool}}}:{tenant_id}:{policy_id}"


def budget_key(pool: str, tenant_id: str, budget_id: str, period: str) -> str:
    return f"bud:{{{pool}}}:{tenant_id}:{budget_id}:{period}"


# Functions for the scripts below and those of `controlplane`; `{p}` is the pool.
ENQUEUE = """
local function enqueue(q, class, tenant, item, tokens, side)
  redis.call(side, q .. ':' .. class .. ':' .. tenant, item)
  redis.call('HINCRBY', q .. ':sums', class .. ':' .. tenant, tokens)
  redis.call('HINCRBY', q .. ':sums', '*', tokens)
  redis.call('HINCRBY', q .. ':sums', 'n', 1)
  local active, idle = q .. ':' .. class, q .. ':' .. class .. ':vt'
  if redis.call('ZSCORE', active, tenant) then return end
  local floor = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')[2]
    or redis.call('HGET', q .. ':sums', 'floor:' .. class) or '0'
  local own = redis.call('ZSCORE', idle, tenant)
  if own then
    redis.call('ZREM', idle, tenant)
    if tonumber(own) > tonumber(floor) then floor = own end
  end
  redis.call('ZADD', active, floor, tenant)
end

local function poke(pool, q)
  for _ = 1, 3 do
    local worker = redis.call('ZPOPMAX', q .. ':idle')[1]
    if not worker then return end
    if redis.call('EXISTS', 'wk:{' .. pool .. '}:' .. worker) == 1 then
      redis.call('XADD', 'ctl:{' .. pool .. '}:' .. worker, 'MAXLEN', '~', CONTROL, '*',
        'm', '{"action":"poke"}')
      return
    end
  end
end
""".replace("CONTROL", str(CONTROL_STREAM_MAX_LEN))

# Put a dispatched request back at the front, as if it had not been taken; once per lease.
PUT_BACK = (
    ENQUEUE
    + """
local function put_back(pool, job, inbox, entry, group)
  local q, class, tenant, item, tokens, charged = unpack(redis.call('HMGET', job,
    'q', 'class', 'tenant', 'item', 'tokens', 'charged'))
  redis.call('HSET', job, 'state', 'queued', 'charged', 0)
  redis.call('HDEL', job, 'boot', 'worker', 'alone')
  if entry ~= '' then
    redis.call('XACK', inbox, group, entry)
    redis.call('XDEL', inbox, entry)
  end
  enqueue(q, class, tenant, item, tokens, 'LPUSH')
  redis.call('ZINCRBY', q .. ':' .. class, -(tonumber(charged) or 0), tenant)
  poke(pool, q)
end
"""
)

# What a request's end gives back: its share of the queue by exact counts, its limits, its budgets.
FINISH = """
local function finish(job, request_id, prompt, output)
  local q, class, tenant, charged, hold = unpack(redis.call('HMGET', job,
    'q', 'class', 'tenant', 'charged', 'hold'))
  if not q then return end
  local active, idle = q .. ':' .. class, q .. ':' .. class .. ':vt'
  local more = prompt + WEIGHT * output - (tonumber(charged) or 0)
  if redis.call('ZSCORE', active, tenant) then
    redis.call('ZINCRBY', active, more, tenant)
  else
    if not redis.call('ZSCORE', idle, tenant) then
      local floor = redis.call('HGET', q .. ':sums', 'floor:' .. class) or '0'
      redis.call('ZADD', idle, floor, tenant)
    end
    redis.call('ZINCRBY', idle, more, tenant)
  end
  local used = prompt + output
  for kind, key, rate, reserved in string.gmatch(hold or '', '(%S+) (%S+) (%S+) (%S+)\\n') do
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
""".replace("WEIGHT", str(OUTPUT_WEIGHT))

# KEYS out, done, inbox, job … | ARGV group, out length, out ttl, done job's ttl, then per job
# lease, seq, event, emitted, prompt, cached, done record or '', inbox entry
# -> indexes of the jobs whose lease is somebody else's now
PUBLISH = (
    "redis.replicate_commands()\n"
    + FINISH
    + """
-- Given up: its job is kept for people to see, and its adapters are not served any more.
local function bury(job, done)
  local pool = string.match(done, '{(.*)}')
  local m, worker, item = unpack(redis.call('HMGET', job, 'm', 'worker', 'item'))
  if not m then return end
  redis.call('XADD', 'dlq:{' .. pool .. '}', 'MAXLEN', '~', LETTERS, '*',
    'm', m, 'source', worker or '', 'reason', 'given up')
  for digest in string.gmatch(string.match(item, '%S+ %S+ (.*)'), '[^,]+') do
    redis.call('HSET', 'quar:{' .. pool .. '}', digest, redis.call('TIME')[1])
  end
end

local events, stale = {}, {}
for i = 4, #KEYS do
  local job, at = KEYS[i], 4 + (i - 4) * 8
  local lease, seq, state = unpack(redis.call('HMGET', job, 'lease', 'seq', 'state'))
  if not lease and ARGV[at + 7] ~= '' then
    -- Redis has lost the job. What was done is recorded; a request is billed once in any case.
    redis.call('XADD', KEYS[2], '*', 'm', ARGV[at + 7])
  end
  -- Handed back, though the reply may have been lost: it is whoever's pulls it next.
  if lease ~= ARGV[at + 1] or state == 'queued' then
    stale[#stale + 1] = i - 4
  elseif state ~= 'done' and tonumber(seq) == tonumber(ARGV[at + 2]) then
    events[#events + 1] = ARGV[at + 3]
    redis.call('HSET', job, 'seq', seq + 1, 'emitted', ARGV[at + 4],
      'prompt_tokens', ARGV[at + 5], 'cached_tokens', ARGV[at + 6])
    if ARGV[at + 7] ~= '' then
      redis.call('XADD', KEYS[2], '*', 'm', ARGV[at + 7])
      redis.call('XACK', KEYS[3], ARGV[1], ARGV[at + 8])
      redis.call('XDEL', KEYS[3], ARGV[at + 8])
      finish(job, string.match(job, '}:(.*)$'), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 4]))
      if tonumber(redis.call('HGET', job, 'attempt') or 0) > ATTEMPTS then
        bury(job, KEYS[2])
      end
      -- For who comes late. Redis packs a new hash of so little; the old one it would not.
      local tenant, attempt = unpack(redis.call('HMGET', job, 'tenant', 'attempt'))
      redis.call('DEL', job)
      redis.call('HSET', job, 'state', 'done', 'tenant', tenant or '', 'lease', lease,
        'attempt', attempt or 0, 'seq', seq + 1, 'emitted', ARGV[at + 4],
        'prompt_tokens', ARGV[at + 5], 'cached_tokens', ARGV[at + 6])
      redis.call('EXPIRE', job, ARGV[4])
    end
  end
end
if #events > 0 then
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*',
    'm', '[' .. table.concat(events, ',') .. ']')
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return stale
""".replace("ATTEMPTS", str(MAX_ATTEMPTS)).replace("LETTERS", str(DEAD_LETTER_MAX_LEN))
)

# KEYS queue, inbox, residents | ARGV pool, worker, boot, how many, group
# -> (inbox entry, job, lease, attempt, cancel) …
#
# Requests that were cancelled or are too late come too, beyond the count and free of charge: the
# worker ends them, so that every request ends in one way.
PULL = """
redis.replicate_commands()
local q, inbox = KEYS[1], KEYS[2]
local pool, worker, boot, group = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local want = tonumber(ARGV[4])
local taken, seen, pulled = 0, 0, {}
-- A later run has this worker's id, and its inbox.
if (redis.call('HGET', 'wk:{' .. pool .. '}:' .. worker, 'boot') or boot) ~= boot then return {} end
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
  local found, tenants = redis.call('ZRANGE', active, 0, WINDOW - 1, 'WITHSCORES'), {}
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
  local skips = q .. ':' .. class .. ':skip'
  if tonumber(redis.call('HGET', skips, tenants[1].id) or 0) >= SKIPS then return 1 end
  for i = 2, #tenants do
    if head(class, tenants[i]) and tenants[i].resident then
      for j = 1, i - 1 do
        if tonumber(redis.call('HINCRBY', skips, tenants[j].id, 1)) > SKIPS then
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
  local job = 'job:{' .. pool .. '}:' .. id
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
    redis.call('HSET', q .. ':sums', 'floor:' .. class, string.format('%.17g', tenants[1].counter))
    redis.call('ZREMRANGEBYSCORE', active .. ':vt', '-inf',
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
      redis.call('HDEL', active .. ':skip', tenant.id)
      redis.call('HINCRBY', q .. ':sums', 'n', -1)
      if tonumber(tokens) > 0 then  -- "-0" is no integer to Redis
        redis.call('HINCRBY', q .. ':sums', '*', -tokens)
        redis.call('HINCRBY', q .. ':sums', class .. ':' .. tenant.id, -tokens)
      end
      tenant.counter = tenant.counter + cost
    end
    table.remove(tenants, at)
    if redis.call('EXISTS', waiting) == 0 then
      redis.call('ZREM', active, tenant.id)
      redis.call('HDEL', q .. ':sums', class .. ':' .. tenant.id)
      redis.call('ZADD', active .. ':vt', string.format('%.17g', tenant.counter), tenant.id)
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

local has_both = redis.call('EXISTS', q .. ':i') == 1 and redis.call('EXISTS', q .. ':b') == 1
-- Of the dispatches, not of the pulls: who takes many at a time passes the batch class's turn.
if has_both and redis.call('HINCRBY', q .. ':sums', 'turn', want) % SHARE < want then
  serve('b', 1)
end
if taken < want then serve('i', want - taken) end
if taken < want then serve('b', want - taken) end
if #pulled == 0 then
  redis.call('ZADD', q .. ':idle', now, worker)
  redis.call('ZREMRANGEBYSCORE', q .. ':idle', '-inf', now - 60)
end
if #pulled > 0 then
  redis.call('SADD', 'in:{' .. pool .. '}', worker)
  redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', #pulled, 'STREAMS', inbox, '>')
end
return pulled
"""
PULL = (
    PULL.replace("WINDOW", str(AFFINITY_WINDOW))
    .replace("SKIPS", str(MAX_SKIPS))
    .replace("SHARE", str(BATCH_SHARE))
)
