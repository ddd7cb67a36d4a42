-- Remove the answers of a batch that has ended.
-- KEYS pending lines, out | ARGV fence
-- The fence stays: of the runners that were given up one may still wake.
local fence = redis.call('HGET', KEYS[1], 'fence')
if fence and tonumber(fence) > tonumber(ARGV[1]) then return end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
redis.call('EXPIRE', KEYS[1], {BATCH_STREAM_TTL_S})
