-- Say that a worker lives, and read which gateways do.
-- KEYS workers, worker, gateways, residents | ARGV worker id, boot, whether it comes now,
-- heartbeat, ttl, digest …
-- -> time, gateway, its time, …; nothing: another run came later under this id
redis.replicate_commands()
local boot = redis.call('HGET', KEYS[2], 'boot')
if ARGV[3] == '0' and boot and boot ~= ARGV[2] then return {} end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], 'm', ARGV[4], 'boot', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('DEL', KEYS[4])
for i = 6, #ARGV do redis.call('SADD', KEYS[4], ARGV[i]) end
redis.call('EXPIRE', KEYS[4], ARGV[5])
local gateways = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
table.insert(gateways, 1, tostring(now))
return gateways
