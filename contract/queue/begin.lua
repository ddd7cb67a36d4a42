-- Take up a request that an earlier run of this worker left in its inbox.
-- KEYS job, inbox, worker | ARGV worker, boot, inbox entry
-- -> state as it was, lease, attempt, emitted, prompt, cached, cancel
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
