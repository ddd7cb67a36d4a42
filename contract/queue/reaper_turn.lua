-- Begin a reaper's turn.
-- KEYS reaper | ARGV seconds of a turn, seconds after which nobody has watched
-- -> time as Redis gives it, since when the pool is watched; nothing: it is another's turn
redis.replicate_commands()
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local passed = now - (redis.call('HGET', KEYS[1], 'looked') or 0)
if passed >= 0 and passed < tonumber(ARGV[1]) then return {} end
if passed < 0 or passed > tonumber(ARGV[2]) then redis.call('HSET', KEYS[1], 'since', now) end
redis.call('HSET', KEYS[1], 'looked', now)
return {time[1], time[2], redis.call('HGET', KEYS[1], 'since')}
