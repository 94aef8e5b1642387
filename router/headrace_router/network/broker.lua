-- Every transition of the shared broker, as one script: each call is atomic. See broker.py for the rules.
--
-- KEYS[1]: the prefix of all keys, which is one hash tag.
-- ARGV: operation; time in ms, "" for the store's own; the calling gateway; the policy (10 numbers); a random name for a store
-- that has none; what the operation takes.
-- Returns {result, notes, {waiting, tokens, leased, version of the sessions, epoch, waiting by class...}}.
--
-- PREFIX:queue       zset   waiting jobs as "arrival:job", by score
-- PREFIX:leases      zset   job -> end of its lease, ms
-- PREFIX:deadlines   zset   job -> end of its time, ms
-- PREFIX:flows       hash   flow -> virtual time at which its last job ends
-- PREFIX:tenants     hash   tenant -> jobs that have not ended
-- PREFIX:state       hash   virtual time, arrivals, tokens and classes in the queue, clock, epoch
-- PREFIX:sessions    set    sessions; PREFIX:session:S hash, PREFIX:held:S set of jobs
-- PREFIX:gateways    zset   gateway -> last sign of it, ms
-- PREFIX:job:J       hash   what is known of a job; PREFIX:log:J stream of its events, with ids "attempt-(seq + 1)"
-- PREFIX:claim:K     string "digest job" of an idempotency key; no job yet: "digest "
-- PREFIX:bell, PREFIX:to:GATEWAY   channels: there is work; there is news (JSON)

local prefix, op, given, gateway = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local policy = {
  size = tonumber(ARGV[4]), tokens = tonumber(ARGV[5]), queue_time = tonumber(ARGV[6]), run_time = tonumber(ARGV[7]),
  lease = tonumber(ARGV[8]), stall = tonumber(ARGV[9]), attempts = tonumber(ARGV[10]), retention = tonumber(ARGV[11]),
  prompt_token = tonumber(ARGV[12]), silence = tonumber(ARGV[13]),
}
local at = 14  -- of the argument read last
local WINDOW, MAX_GAP, CLAIM, SWEPT = 32, 1000, 10000, 200

local function arg()
  at = at + 1
  return ARGV[at]
end

local function number() return tonumber(arg()) end

local function key(kind, name) return prefix .. ':' .. kind .. (name and (':' .. name) or '') end

local QUEUE, LEASES, DEADLINES, FLOWS = key('queue'), key('leases'), key('deadlines'), key('flows')
local TENANTS, STATE, SESSIONS, GATEWAYS = key('tenants'), key('state'), key('sessions'), key('gateways')
local call = redis.call
local notes, rung, remote = {}, false, {}

-- Time that stands still while no gateway asks, so that nothing lapses for that the store was down.
local function clock()
  if given ~= '' then return tonumber(given) end
  local time, seen = call('TIME'), call('HMGET', STATE, 'wall', 'now')
  local wall = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local passed = math.min(wall - (tonumber(seen[1]) or wall), MAX_GAP)
  local now = (tonumber(seen[2]) or 0) + math.max(passed, 0)
  call('HSET', STATE, 'wall', wall, 'now', now)
  return now
end

local now = clock()

local FIELDS = {
  'state', 'attempt', 'session', 'member', 'score', 'flow', 'weight', 'cost', 'total', 'prompt', 'n', 'seq', 'base', 'leased',
  'format', 'exact', 'excluded', 'readers', 'tenant', 'class', 'claim', 'needs', 'tier', 'only', 'submitted',
}
local NUMBERS = {
  attempt = true, score = true, weight = true, cost = true, total = true, prompt = true, n = true, seq = true, base = true,
  tier = true, submitted = true,
}

local function load(job)
  local found = call('HMGET', key('job', job), unpack(FIELDS))
  if not found[1] then return nil end
  local r = {job = job}
  for i, name in ipairs(FIELDS) do
    r[name] = NUMBERS[name] and tonumber(found[i]) or found[i]
  end
  return r
end

local function save(r, ...)
  local pairs_ = {}
  for _, name in ipairs({...}) do
    pairs_[#pairs_ + 1] = name
    pairs_[#pairs_ + 1] = r[name]
  end
  call('HSET', key('job', r.job), unpack(pairs_))
end

local function note(...) notes[#notes + 1] = {...} end

local function append(r, kind, index, data)
  call('XADD', key('log', r.job), string.format('%d-%d', r.attempt, r.seq + 1), 'k', kind, 'i', index, 'd', data)
  r.seq = r.seq + 1
end

-- Hints for who reads the log; `quiet`: this gateway knows already.
local function tell(r, quiet)
  if quiet and r.readers == '|' .. gateway .. '|' then return end
  for reader in string.gmatch(r.readers, '[^|]+') do
    if reader ~= gateway then
      remote[reader] = remote[reader] or {'news'}
      table.insert(remote[reader], r.job)
    elseif not quiet then
      note('news', r.job)
    end
  end
end

local function send(to, message) call('PUBLISH', key('to', to), cjson.encode(message)) end

local function revoke(r, reason)
  local owner = call('HGET', key('session', r.session), 'gateway')
  if owner == gateway then
    note('revoke', r.session, r.job, r.attempt, reason)
  elseif owner then
    send(owner, {'revoke', r.session, r.job, r.attempt, reason})
  end
end

local function count(r, by)
  call('HINCRBY', STATE, 'tokens', by * r.total)
  call('HINCRBY', STATE, 'class:' .. r.class, by)
end

local function enqueue(r)
  call('ZADD', QUEUE, r.score, r.member)
  count(r, 1)
  rung = true
end

local function dequeue(r)
  call('ZREM', QUEUE, r.member)
  count(r, -1)
end

local function let_go(r)
  call('ZREM', LEASES, r.job)
  call('SREM', key('held', r.session), r.job)
end

-- The terminal transition.
local function finish(r, kind, data, quiet)
  if r.state == 'queued' then dequeue(r) else let_go(r) end
  append(r, kind, -1, data)
  r.state = kind
  save(r, 'state', 'seq', 'n')
  call('ZREM', DEADLINES, r.job)
  if call('HINCRBY', TENANTS, r.tenant, -1) <= 0 then call('HDEL', TENANTS, r.tenant) end
  local ends = tonumber(call('HGET', FLOWS, r.flow))
  if ends then
    ends = ends + (r.prompt + 2 * r.n - r.cost) / r.weight
    if ends <= (tonumber(call('HGET', STATE, 'virtual')) or 0) then
      call('HDEL', FLOWS, r.flow)
    else
      call('HSET', FLOWS, r.flow, ends)
    end
  end
  call('PEXPIRE', key('job', r.job), policy.retention)
  call('PEXPIRE', key('log', r.job), policy.retention)
  if r.claim ~= '' then call('PEXPIRE', key('claim', r.claim), policy.retention) end
  note('outcome', kind)
  tell(r, quiet)
end

local function requeue(r, reason, exclude)
  if r.attempt >= policy.attempts then
    local text = r.attempt .. ' workers were lost or failed with this request; the last one: ' .. reason
    finish(r, 'failed', cjson.encode({code = 'attempts_exhausted', message = text, retriable = false}))
    return
  end
  let_go(r)
  if exclude then r.excluded = r.excluded .. r.session .. '|' end
  r.state, r.session = 'queued', ''
  save(r, 'state', 'session', 'excluded', 'n', 'seq')
  enqueue(r)
  note('redelivery', reason)
end

-- The job, if this is its current attempt and somebody holds it.
local function current(job, attempt)
  local r = load(job)
  if r and r.state == 'leased' and r.attempt == attempt then return r end
  note('stale')
  return nil
end

local function first_lease(r) return now + policy.lease + (r.prompt + r.n) * policy.prompt_token end

local function has(list, one) return string.find(list, '|' .. one .. '|', 1, true) ~= nil end

local function may_run(session, holder, r)
  if r.only ~= '' then return r.only == session end
  if r.total > holder.total or r.tier > holder.tier then return false end
  if holder.features ~= '*' then
    for need in string.gmatch(r.needs, '[^|]+') do
      if not has(holder.features, need) then return false end
    end
  end
  if r.exact == '1' and holder.resumes == '1' and r.format ~= '' and r.format ~= holder.format then return false end
  if has(r.excluded, session) then
    for _, other in ipairs(call('SMEMBERS', SESSIONS)) do
      if not has(r.excluded, other) then return false end
    end
  end
  return true
end

local function holder_of(session)
  local found = call('HMGET', key('session', session), 'format', 'total', 'tier', 'features', 'resumes')
  if not found[1] then return nil end
  return {
    format = found[1], total = tonumber(found[2]), tier = tonumber(found[3]), features = found[4], resumes = found[5],
  }
end

local function detach(session, reason)
  for _, job in ipairs(call('SMEMBERS', key('held', session))) do
    requeue(load(job), reason, false)
  end
  call('DEL', key('session', session), key('held', session))
  call('SREM', SESSIONS, session)
  call('HINCRBY', STATE, 'version', 1)
end

-- Begin a job's record; `r` has its facts.
local function create(r, payload)
  save(r, unpack(FIELDS))
  call('HSET', key('job', r.job), 'payload', payload)
  call('HINCRBY', TENANTS, r.tenant, 1)
end

local function arrive(r, cost)
  local arrival = call('HINCRBY', STATE, 'arrivals', 1)
  local ends = tonumber(call('HGET', FLOWS, r.flow)) or 0
  r.score = math.max(tonumber(call('HGET', STATE, 'virtual')) or 0, ends)
  r.member = string.format('%016d:%s', arrival, r.job)
  call('HSET', FLOWS, r.flow, r.score + cost)
end

local function read_facts()
  return {
    job = arg(), flow = arg(), weight = number(), cost = number(), total = number(), prompt = number(), tenant = arg(),
    class = arg(), needs = arg(), tier = number(), only = arg(), state = 'queued', attempt = 0, session = '', n = 0, seq = 0,
    base = 0, leased = '', format = '', exact = '1', excluded = '|', readers = '|' .. gateway .. '|', claim = '',
    submitted = now,
  }
end

local ops = {}

function ops.submit()
  local r, payload = read_facts(), arg()
  local known = load(r.job)
  if known then return {'ok', call('ZRANK', QUEUE, known.member) or 0} end  -- asked again: the answer was lost
  local waiting, tokens = call('ZCARD', QUEUE), tonumber(call('HGET', STATE, 'tokens')) or 0
  if waiting >= policy.size or (policy.tokens > 0 and waiting > 0 and tokens + r.total > policy.tokens) then return {'full'} end
  arrive(r, r.cost / r.weight)
  create(r, payload)
  enqueue(r)
  call('ZADD', DEADLINES, now + policy.queue_time, r.job)
  note('accepted')
  return {'ok', call('ZRANK', QUEUE, r.member)}
end

function ops.claim()
  local name, digest = key('claim', arg()), arg()
  local known = call('GET', name)
  if known then
    local space = string.find(known, ' ', 1, true)
    local job = string.sub(known, space + 1)
    if string.sub(known, 1, space - 1) ~= digest then return 'conflict' end
    if job == '' then return 'pending' end
    if call('EXISTS', key('job', job)) == 1 then return 'job ' .. job end
  end
  call('SET', name, digest .. ' ', 'PX', CLAIM)
  return 'mine'
end

function ops.settle()
  local claim, digest, job = arg(), arg(), arg()
  local name = key('claim', claim)
  if job == '' then
    call('DEL', name)
    return
  end
  local left = call('PTTL', key('job', job))  -- -1: it lives; -2: it is gone already
  if left == -2 then return end
  call('SET', name, digest .. ' ' .. job)
  call('HSET', key('job', job), 'claim', claim)
  if left > 0 then call('PEXPIRE', name, left) end
end

function ops.cancel()
  local r, by = load(arg()), arg()
  if not r or (r.state ~= 'queued' and r.state ~= 'leased') then return 0 end
  if r.state == 'leased' then revoke(r, by) end
  finish(r, 'cancelled', cjson.encode({by = by}))
  return 1
end

function ops.status()
  local r = load(arg())
  if not r then return false end
  local position, last = -1, false
  if r.state == 'queued' then
    position = call('ZRANK', QUEUE, r.member)
  elseif r.state ~= 'leased' then
    last = call('XREVRANGE', key('log', r.job), '+', '-', 'COUNT', 1)[1]
  end
  return {r.state, r.attempt, r.n, position, call('HGET', key('job', r.job), 'payload'), last}
end

-- New entries of some jobs' logs; this gateway is told of later ones.
function ops.read()
  local found = {}
  for _ = 1, number() do
    local job, after = arg(), arg()
    local readers = call('HGET', key('job', job), 'readers')
    if readers and not has(readers, gateway) then call('HSET', key('job', job), 'readers', readers .. gateway .. '|') end
    found[#found + 1] = readers and call('XRANGE', key('log', job), '(' .. after, '+')
  end
  return found
end

function ops.live() return tonumber(call('HGET', TENANTS, arg())) or 0 end

function ops.attach()
  local session = arg()
  call('SADD', SESSIONS, session)
  call('HSET', key('session', session), 'gateway', gateway, 'format', arg(), 'total', arg(), 'tier', arg(), 'features', arg(),
    'resumes', arg(), 'holder', arg())
  call('HINCRBY', STATE, 'version', 1)
  call('ZADD', GATEWAYS, now, gateway)
  rung = true
end

function ops.holders()
  local made = {}
  for _, session in ipairs(call('SMEMBERS', SESSIONS)) do
    made[#made + 1] = call('HGET', key('session', session), 'holder')
  end
  return made
end

function ops.detach() detach(arg(), arg()) end

-- This gateway has these sessions, and they hold these jobs: all else that is said to be its own is given back.
function ops.reconcile()
  local sessions, held = {}, {}
  for _ = 1, number() do sessions[arg()] = true end
  for _ = 1, number() do held[arg() .. '@' .. arg()] = true end
  local unknown = {}
  for _, session in ipairs(call('SMEMBERS', SESSIONS)) do
    if call('HGET', key('session', session), 'gateway') == gateway then
      if not sessions[session] then
        detach(session, 'broker')
      else
        for _, job in ipairs(call('SMEMBERS', key('held', session))) do
          local r = load(job)
          if not held[job .. '@' .. r.attempt] then requeue(r, 'broker', false) end
        end
      end
      sessions[session] = nil
    end
  end
  for session in pairs(sessions) do unknown[#unknown + 1] = session end
  return unknown
end

function ops.lease()
  local session, most, room = arg(), number(), number()
  local holder = holder_of(session)
  if not holder then return false end
  local made = {}
  for _, member in ipairs(call('ZRANGE', QUEUE, 0, WINDOW + most - 1)) do
    if #made >= most then break end
    local r = load(string.sub(member, 18))
    if may_run(session, holder, r) then
      if room >= 0 then
        if r.total > room then break end
        room = room - r.total
      end
      dequeue(r)
      call('HSET', STATE, 'virtual', math.max(tonumber(call('HGET', STATE, 'virtual')) or 0, r.score))
      r.attempt, r.state, r.session = r.attempt + 1, 'leased', session
      if r.leased == '' then
        r.leased = now
        call('ZADD', DEADLINES, now + policy.run_time, r.job)
      end
      call('ZADD', LEASES, first_lease(r), r.job)
      call('SADD', key('held', session), r.job)
      local kind, log = r.n > 0 and 'resumed' or 'started', {}
      if r.n > 0 and not (r.exact == '1' and holder.resumes == '1') then
        kind, r.n, r.format, r.exact = 'reset', 0, '', '1'
      elseif r.n > 0 then
        log = call('XREVRANGE', key('log', r.job), '+', '-')
        note('resumed', r.n)
      end
      r.base = r.n
      append(r, kind, r.n, '')
      save(r, 'attempt', 'state', 'session', 'leased', 'n', 'format', 'exact', 'base', 'seq')
      tell(r)
      made[#made + 1] = {
        r.job, r.attempt, call('HGET', key('job', r.job), 'payload'), tostring(r.leased - r.submitted), log,
      }
    end
  end
  return made
end

-- The hot path: only what a token needs is read of its job.
local function progress(job, attempt, index, tokens, ended)
  local state, at_, n, seq_, session, format, readers =
    unpack(call('HMGET', key('job', job), 'state', 'attempt', 'n', 'seq', 'session', 'format', 'readers'))
  if state ~= 'leased' or tonumber(at_) ~= attempt then
    note('stale')
    return {0}
  end
  local r = {
    job = job, attempt = attempt, n = tonumber(n), seq = tonumber(seq_), session = session, format = format, readers = readers,
  }
  local known, seq = r.n - index, r.seq
  if known < 0 then
    requeue(load(job), 'gap', true)
    return {0}
  end
  for place = known + 1, #tokens do
    append(r, 'token', r.n, tokens[place])
    r.n = r.n + 1
  end
  if r.seq > seq then
    call('ZADD', LEASES, now + policy.stall, job)
    if r.format == '' then
      local holder = holder_of(r.session)
      r.format, r.exact = holder.format, holder.resumes
      save(r, 'format', 'exact')
    end
  end
  if ended ~= '' then
    save(r, 'n', 'seq')
    finish(load(job), 'done', ended, true)
  elseif r.seq > seq then
    save(r, 'n', 'seq')
    tell(r, true)
  end
  return {1, seq, known}
end

function ops.progress()
  local made = {}
  for _ = 1, number() do
    local job, attempt, index, ended, tokens = arg(), number(), number(), arg(), {}
    for place = 1, number() do tokens[place] = arg() end
    made[#made + 1] = progress(job, attempt, index, tokens, ended)
  end
  return made
end

function ops.renew()
  local session = arg()
  for _ = 1, number() do
    local r, attempt = load(arg()), number()
    if r and r.state == 'leased' and r.session == session and r.attempt == attempt and r.n == r.base then
      call('ZADD', LEASES, 'GT', first_lease(r), r.job)
    end
  end
end

function ops.release()
  local r = current(arg(), number())
  if not r then return 0 end
  requeue(r, arg(), true)
  return 1
end

function ops.fail()
  local r = current(arg(), number())
  if not r then return 0 end
  finish(r, 'failed', arg())
  return 1
end

function ops.refuse()
  local r = load(arg())
  if not r or r.state ~= 'queued' or r.leased ~= '' then return 0 end
  finish(r, 'failed', arg())
  return 1
end

function ops.sweep()
  call('ZADD', GATEWAYS, now, gateway)
  for _, job in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', 0, SWEPT)) do
    local r = load(job)
    if r.state == 'leased' then revoke(r, 'deadline') end
    finish(r, 'expired', cjson.encode({which = r.leased == '' and 'queue' or 'run'}))
  end
  for _, job in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, SWEPT)) do
    local r = load(job)
    revoke(r, 'stale')
    requeue(r, 'lease', true)
  end
  local silent = call('ZRANGEBYSCORE', GATEWAYS, '-inf', now - policy.silence)
  if #silent > 0 then
    local gone = {}
    for _, name in ipairs(silent) do
      gone[name] = true
      call('ZREM', GATEWAYS, name)
    end
    for _, session in ipairs(call('SMEMBERS', SESSIONS)) do
      if gone[call('HGET', key('session', session), 'gateway')] then detach(session, 'gateway') end
    end
  end
end

-- The gateway stops.
function ops.leave()
  for _, session in ipairs(call('SMEMBERS', SESSIONS)) do
    if call('HGET', key('session', session), 'gateway') == gateway then detach(session, 'shutdown') end
  end
  call('ZREM', GATEWAYS, gateway)
end

-- The store has lost a job that this gateway knows: its record and its log, as they were.
function ops.restore()
  local r, payload = read_facts(), arg()
  r.attempt, r.format, r.exact, r.excluded = number(), arg(), arg(), arg()
  local entries = number()
  if call('EXISTS', key('job', r.job)) == 1 then return 0 end
  for _ = 1, entries do
    local id, kind, index, data = arg(), arg(), number(), arg()
    call('XADD', key('log', r.job), id, 'k', kind, 'i', index, 'd', data)
    r.seq = r.seq + 1
    if kind == 'token' then r.n = index + 1 elseif kind == 'reset' then r.n = 0 end
  end
  if r.attempt > 0 then r.leased = now end
  r.base = r.n
  arrive(r, r.cost / r.weight)
  create(r, payload)
  enqueue(r)
  call('ZADD', DEADLINES, now + (r.attempt > 0 and policy.run_time or policy.queue_time), r.job)
  return 1
end

call('HSETNX', STATE, 'epoch', ARGV[14])
local result = ops[op]()
if rung then call('PUBLISH', key('bell'), gateway) end
for to, message in pairs(remote) do send(to, message) end
local stats = call('HMGET', STATE, 'tokens', 'version', 'epoch', 'class:chat', 'class:agent', 'class:document')
return {
  result or false, notes,
  {call('ZCARD', QUEUE), tonumber(stats[1]) or 0, call('ZCARD', LEASES), tonumber(stats[2]) or 0,
    stats[3], tonumber(stats[4]) or 0, tonumber(stats[5]) or 0, tonumber(stats[6]) or 0},
}
