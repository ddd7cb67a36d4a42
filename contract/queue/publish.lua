-- Send a gateway its events, and finish the requests that ended.
-- KEYS out, done, inbox, job … | ARGV group, out length, out ttl, done job's ttl, then per job
-- lease, seq, event, emitted, prompt, cached, done record or '', inbox entry
-- -> indexes of the jobs whose lease is somebody else's now
redis.replicate_commands()
--#include finish

-- Give a request up: keep its job for people to see, and serve its adapters no more.
local function dead_letter(job, done)
  local pool = string.match(done, '{(.*)}')
  local m, worker, item = unpack(redis.call('HMGET', job, 'm', 'worker', 'item'))
  if not m then return end
  redis.call('XADD', {dead_letter_key(pool)}, 'MAXLEN', '~', {DEAD_LETTER_MAX_LEN}, '*',
    'm', m, 'source', worker or '', 'reason', 'given up')
  for digest in string.gmatch(string.match(item, '%S+ %S+ (.*)'), '[^,]+') do
    redis.call('HSET', {quarantine_key(pool)}, digest, redis.call('TIME')[1])
  end
end

local events, stale = {}, {}
for i = 4, #KEYS do
  local job, at = KEYS[i], 4 + (i - 4) * 8
  local lease, seq, state = unpack(redis.call('HMGET', job, 'lease', 'seq', 'state'))
  if not lease and ARGV[at + 7] ~= '' then
    -- Redis has lost the job. What was done is recorded; a request is billed once in any case.
    redis.call('XADD', KEYS[2], '*', 'm', ARGV[at + 7])
  end
  -- Handed back, though the reply may have been lost: it is whoever's pulls it next.
  if lease ~= ARGV[at + 1] or state == 'queued' then
    stale[#stale + 1] = i - 4
  elseif state ~= 'done' and tonumber(seq) == tonumber(ARGV[at + 2]) then
    events[#events + 1] = ARGV[at + 3]
    redis.call('HSET', job, 'seq', seq + 1, 'emitted', ARGV[at + 4],
      'prompt_tokens', ARGV[at + 5], 'cached_tokens', ARGV[at + 6])
    if ARGV[at + 7] ~= '' then
      redis.call('XADD', KEYS[2], '*', 'm', ARGV[at + 7])
      redis.call('XACK', KEYS[3], ARGV[1], ARGV[at + 8])
      redis.call('XDEL', KEYS[3], ARGV[at + 8])
      finish(job, string.match(job, '}:(.*)$'), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 4]))
      if tonumber(redis.call('HGET', job, 'attempt') or 0) > {MAX_ATTEMPTS} then
        dead_letter(job, KEYS[2])
      end
      -- For who comes late. Redis packs a new hash of so little; the old one it would not.
      local tenant, attempt = unpack(redis.call('HMGET', job, 'tenant', 'attempt'))
      redis.call('DEL', job)
      redis.call('HSET', job, 'state', 'done', 'tenant', tenant or '', 'lease', lease,
        'attempt', attempt or 0, 'seq', seq + 1, 'emitted', ARGV[at + 4],
        'prompt_tokens', ARGV[at + 5], 'cached_tokens', ARGV[at + 6])
      redis.call('EXPIRE', job, ARGV[4])
    end
  end
end
if #events > 0 then
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*',
    'm', '[' .. table.concat(events, ',') .. ']')
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return stale
