"""The Lua that only workers run; `contract.queue.fair_queue` has what others run too.

All changes to a request go through a script that compares the lease first, so a worker that was
paused and replaced can no longer tell anything, acknowledge anything or bill anything. Each
script may be repeated after a lost reply without a second effect.
"""

from __future__ import annotations

from contract.queue import fair_queue

# KEYS job, inbox, worker | ARGV worker, boot, inbox entry
# -> state as it was, lease, attempt, emitted, prompt, cached, cancel
BEGIN = """
if (redis.call('HGET', KEYS[3], 'boot') or ARGV[2]) ~= ARGV[2] then return {'replaced'} end
-- No longer here: this worker was taken for dead meanwhile, and the request is another's.
if #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then return {'gone'} end
local state, boot = unpack(redis.call('HMGET', KEYS[1], 'state', 'boot'))
if not state then return {'gone'} end
if state == 'done' then return {'done'} end
if boot ~= ARGV[2] then
  local attempt, alone = unpack(redis.call('HMGET', KEYS[1], 'attempt', 'alone'))
  -- One that was only waiting for its turn to run alone did not cause the crash.
  if tonumber(attempt or 0) < 2 or alone then redis.call('HINCRBY', KEYS[1], 'attempt', 1) end
  redis.call('HINCRBY', KEYS[1], 'lease', 1)
  redis.call('HDEL', KEYS[1], 'alone')
  redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[1], 'boot', ARGV[2], 'seq', 0)
end
local now = redis.call('HMGET', KEYS[1],
  'lease', 'attempt', 'emitted', 'prompt_tokens', 'cached_tokens', 'cancel')
return {state, now[1], now[2], now[3], now[4], now[5], now[6]}
"""

# KEYS job, inbox | ARGV lease, pool, inbox entry, group, whether the attempt counts
HAND_BACK = (
    fair_queue.PUT_BACK
    + """
local lease, state = unpack(redis.call('HMGET', KEYS[1], 'lease', 'state'))
if lease ~= ARGV[1] or state ~= 'running' then return 0 end
if ARGV[5] == '0' then redis.call('HINCRBY', KEYS[1], 'attempt', -1) end
put_back(ARGV[2], KEYS[1], KEYS[2], ARGV[3], ARGV[4])
return 1
"""
)

# KEYS job | ARGV lease, attempts that no request has
CONVICT = """
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return end
redis.call('HSET', KEYS[1], 'attempt', ARGV[2])
"""

# KEYS job | ARGV lease -> whether the lease is held
ALONE = """
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'alone', 1)
return 1
"""

# KEYS workers, worker, gateways, residents | ARGV worker id, boot, whether it comes now, heartbeat,
# ttl, digest …
# -> time, gateway, its time, …; nothing: another run came later under this id
BEAT = """
redis.replicate_commands()
local boot = redis.call('HGET', KEYS[2], 'boot')
if ARGV[3] == '0' and boot and boot ~= ARGV[2] then return {} end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], 'm', ARGV[4], 'boot', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('DEL', KEYS[4])
for i = 6, #ARGV do redis.call('SADD', KEYS[4], ARGV[i]) end
redis.call('EXPIRE', KEYS[4], ARGV[5])
local gateways = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
table.insert(gateways, 1, tostring(now))
return gateways
"""

# KEYS workers, worker, residents, control | ARGV worker id, boot
UNREGISTER = """
if (redis.call('HGET', KEYS[2], 'boot') or ARGV[2]) ~= ARGV[2] then return end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
"""

SCRIPTS = {
    "alone": ALONE,
    "beat": BEAT,
    "begin": BEGIN,
    "convict": CONVICT,
    "hand_back": HAND_BACK,
    "publish": fair_queue.PUBLISH,
    "pull": fair_queue.PULL,
    "unregister": UNREGISTER,
}
