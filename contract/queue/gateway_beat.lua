-- Say that a gateway lives, and drop what it has read.
-- KEYS gateways, out | ARGV last id read, seconds after which a dead gateway is forgotten,
-- gateway …
redis.replicate_commands()
local now = redis.call('TIME')[1]
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now, ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
-- To the last word, not in whole blocks: what was read is not to rest here, nor in Redis's file.
local ms, number = string.match(ARGV[1], '(%d+)-(%d+)')
redis.call('XTRIM', KEYS[2], 'MINID', ms .. '-' .. string.format('%.0f', number + 1))
return now
