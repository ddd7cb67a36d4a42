-- Put a request that delivered nothing back at the front of its queue.
-- KEYS job, inbox | ARGV lease, pool, inbox entry, group, whether the attempt counts
--#include put_back

local lease, state = unpack(redis.call('HMGET', KEYS[1], 'lease', 'state'))
if lease ~= ARGV[1] or state ~= 'running' then return 0 end
if ARGV[5] == '0' then redis.call('HINCRBY', KEYS[1], 'attempt', -1) end
put_back(ARGV[2], KEYS[1], KEYS[2], ARGV[3], ARGV[4])
return 1
