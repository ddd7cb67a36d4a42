-- Note that a request runs apart from others that were in a crash.
-- KEYS job | ARGV lease -> whether the lease is held
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'alone', 1)
return 1
