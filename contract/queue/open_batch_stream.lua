-- Open the stream of a batch's answers for the runner that holds the fence.
-- KEYS pending lines | ARGV fence -> the hash; nothing when a later runner has it
local fence = redis.call('HGET', KEYS[1], 'fence')
if fence and tonumber(fence) > tonumber(ARGV[1]) then return {} end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
redis.call('EXPIRE', KEYS[1], {BATCH_STREAM_TTL_S})
return redis.call('HGETALL', KEYS[1])
