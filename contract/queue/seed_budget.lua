-- Set a budget that Redis has lost, or that has just begun, to what the database knows of it.
-- KEYS budget | ARGV tokens spent so far, Unix seconds of the period's end
if redis.call('HSETNX', KEYS[1], 'spent', ARGV[1]) == 1 then
  redis.call('EXPIREAT', KEYS[1], ARGV[2])
end
