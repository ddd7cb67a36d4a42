-- Remove what is left of a worker that said that it goes, or has not been heard of for
-- WORKER_TTL_S.
-- KEYS inbox, inboxes, workers, worker, control | ARGV worker
if redis.call('XLEN', KEYS[1]) > 0 or redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[5])
return redis.call('SREM', KEYS[2], ARGV[1])
