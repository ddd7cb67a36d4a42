-- Have a request end because nobody wants its answer.
-- KEYS job | ARGV pool, control message
-- One that is not known may still be on its way here, given up by who sent it: it comes too late.
local state, worker = unpack(redis.call('HMGET', KEYS[1], 'state', 'worker'))
if state == 'done' then return end
if not state then
  redis.call('HSET', KEYS[1], 'state', 'done')
  redis.call('EXPIRE', KEYS[1], {DONE_JOB_TTL_S})
  return
end
redis.call('HSET', KEYS[1], 'cancel', 1)
if worker then
  local pool = ARGV[1]
  redis.call('XADD', {control_key(pool, worker)}, 'MAXLEN', '~', {CONTROL_STREAM_MAX_LEN}, '*',
    'm', ARGV[2])
end
