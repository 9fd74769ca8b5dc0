-- Store the entry, end a lease under way, and wake the herd.
--
-- KEYS: entry, lease, past, rest   ARGV: ms until its key ends ('': never), entry, channel

store(KEYS[1], ARGV[2], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
wake(ARGV[3], '')
return 1
