-- Note that a request ended the engine, so that its end makes a dead letter of it.
-- KEYS job | ARGV lease, attempts that no request has
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return end
redis.call('HSET', KEYS[1], 'attempt', ARGV[2])
