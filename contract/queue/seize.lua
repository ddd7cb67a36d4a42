-- Take over a request of a dead worker.
-- KEYS job, inbox, workers | ARGV pool, worker, seconds of silence, inbox entry, group, attempts
-- -> alive | over | requeued | end, lease, attempt, emitted, prompt, cached, cancel
redis.replicate_commands()
--#include put_back

local job, inbox, group, entry = KEYS[1], KEYS[2], ARGV[5], ARGV[4]
local time = redis.call('TIME')
local heard = redis.call('ZSCORE', KEYS[3], ARGV[2])
if heard and time[1] + time[2] / 1e6 - heard < tonumber(ARGV[3]) then return {'alive'} end
local state, worker, boot, attempt, alone, emitted, cancel = unpack(redis.call('HMGET', job,
  'state', 'worker', 'boot', 'attempt', 'alone', 'emitted', 'cancel'))
if state ~= 'running' or worker ~= ARGV[2] then
  redis.call('XACK', inbox, group, entry)
  redis.call('XDEL', inbox, entry)
  return {'over'}
end
if boot ~= 'reaper' then
  redis.call('HINCRBY', job, 'lease', 1)
  attempt = tonumber(attempt)
  local is_guilty = alone and attempt >= tonumber(ARGV[6])
  if is_guilty then
    redis.call('HINCRBY', job, 'attempt', 1)
  elseif attempt > 1 and not alone then
    -- It was only waiting for its turn to run alone.
    redis.call('HINCRBY', job, 'attempt', -1)
  end
  if not is_guilty and not cancel and tonumber(emitted or 0) == 0 then
    put_back(ARGV[1], job, inbox, entry, group)
    return {'requeued'}
  end
  redis.call('HSET', job, 'boot', 'reaper', 'seq', 0)
end
local now = redis.call('HMGET', job, 'lease', 'attempt', 'emitted', 'prompt_tokens',
  'cached_tokens', 'cancel')
return {'end', now[1], now[2], now[3] or '0', now[4] or '0', now[5] or '0', now[6] or '0'}
