-- Do what `admit` does, for a line of a batch.
-- KEYS job, pending lines | ARGV fence, line, its record, those of `admit` …
-- -> that of `admit`, or fenced
local function admit(KEYS, ARGV)
--#include admit
end
local fence = redis.call('HGET', KEYS[2], 'fence')
if fence and tonumber(fence) > tonumber(ARGV[1]) then return {'fenced', 0, '0', '0'} end
local verdict = admit(KEYS, {unpack(ARGV, 4)})
if verdict[1] == 'ok' then
  redis.call('HSET', KEYS[2], 'fence', ARGV[1], ARGV[2], ARGV[3])
  redis.call('EXPIRE', KEYS[2], {BATCH_STREAM_TTL_S})
  -- Had Redis lost the job and a worker still has it, their leases must differ.
  if #verdict > 1 then redis.call('HSET', KEYS[1], 'lease', redis.call('TIME')[1]) end
end
return verdict
