-- Say that a worker goes on purpose.
-- KEYS workers, worker, residents, control | ARGV worker id, boot
if (redis.call('HGET', KEYS[2], 'boot') or ARGV[2]) ~= ARGV[2] then return end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
