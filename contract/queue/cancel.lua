-- Have a request end because nobody wants its answer.
-- KEYS job | ARGV control message, length of a control stream, prefix of their keys, how long a job
-- that is over is known
-- One that is not known may still be on its way here, given up by who sent it: it comes too late.
local state, worker = unpack(redis.call('HMGET', KEYS[1], 'state', 'worker'))
if state == 'done' then return end
if not state then
  redis.call('HSET', KEYS[1], 'state', 'done')
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  return
end
redis.call('HSET', KEYS[1], 'cancel', 1)
if worker then
  redis.call('XADD', ARGV[3] .. worker, 'MAXLEN', '~', ARGV[2], '*', 'm', ARGV[1])
end
