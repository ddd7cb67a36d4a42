-- A function: put a dispatched request back at the front, as if it had not been taken. Call it once
-- per lease.
--#include enqueue

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
  wake(pool, q)
end
