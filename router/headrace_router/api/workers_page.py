"""The network as a page: it reads GET /v1/workers every other second, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #59636e; --line: #d0d7de; --ground: #fff; --card: #f6f8fa;
  --good: #1a7f37; --busy: #0550ae; --warn: #9a6700; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9198a1; --line: #30363d; --ground: #0d1117;
  --card: #161b22; --good: #56d364; --busy: #79c0ff; --warn: #e3b341; --bad: #ff7b72 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  background: var(--ground) }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0; color: var(--dim) }
code { font-family: ui-monospace, monospace; font-size: .9em }
a { color: var(--busy) }
dl { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.5rem 0 }
@media (max-width: 40rem) { dl { grid-template-columns: repeat(2, 1fr) } }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem }
dt { color: var(--dim); font-size: .85rem } dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums }
.table { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--dim); font-weight: 600; font-size: .85rem } th[scope=row] { color: var(--text); font-weight: 400 }
.number { text-align: right }
meter { width: 5rem; vertical-align: middle } .idle { color: var(--good) } .working { color: var(--busy) }
.paused { color: var(--warn) } .leaving, .lost { color: var(--bad) }
"""

_SCRIPT = """
"use strict";
const at = id => document.getElementById(id);
const number = (value, digits = 0) =>
  value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const ago = seconds => seconds < 90 ? `${seconds} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` :
  seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}
function worker(row, w, now) {
  const name = document.createElement("th");
  name.scope = "row";
  name.append(Object.assign(document.createElement("code"), {textContent: w.session}));
  row.append(name);
  cell(row, w.agent || "-");
  cell(row, `${w.model}${w.weight_format ? ", " + w.weight_format : ""}`);
  cell(row, w.tier);
  cell(row, w.state, w.state);
  const used = cell(row, `${w.running} of ${w.slots} `, "number");
  used.append(Object.assign(document.createElement("meter"), {max: w.slots, value: w.running, ariaHidden: "true"}));
  cell(row, number(w.tokens_per_second, 1), "number");
  cell(row, number(w.tokens), "number");
  cell(row, w.round_trip_ms === null ? "-" : `${number(w.round_trip_ms, 1)} ms`, "number");
  cell(row, ago(Math.max(now - w.connected, 0)), "number");
}
function show(net) {
  at("model").textContent = net.model;
  at("gateway").textContent = net.gateway;
  for (const [id, value] of [["count", number(net.workers.length)], ["slots", `${net.running} of ${net.slots}`],
      ["speed", number(net.tokens_per_second, 1)], ["queue", number(net.queue)], ["tokens", number(net.queue_tokens)],
      ...Object.entries(net.queue_by_class).map(([name, n]) => [name, number(n)])]) at(id).textContent = value;
  const body = document.createElement("tbody");
  for (const w of net.workers) worker(body.insertRow(), w, net.time);
  if (!net.workers.length) cell(body.insertRow(), "No worker is connected.").colSpan = 10;
  at("workers").tBodies[0].replaceWith(body);
}
async function refresh() {
  try {
    const answer = await fetch("v1/workers", {cache: "no-store"});
    if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
    show(await answer.json());
    at("state").textContent = "";
    document.body.dataset.ready = "1";
  } catch (error) {
    at("state").textContent = `This is not up to date: ${error.message}`;
  }
  setTimeout(refresh, document.hidden ? 10000 : 2000);
}
refresh();
"""

_CARDS = (
    ("count", "workers"), ("slots", "slots in use"), ("speed", "tokens a second"), ("queue", "requests waiting"),
    ("tokens", "tokens waiting"), ("chat", "chat waiting"), ("agent", "agent waiting"), ("document", "document waiting"),
)
_COLUMNS = (
    ("worker", ""), ("software", ""), ("model", ""), ("tier", ""), ("state", ""), ("slots in use", "number"),
    ("tokens/s", "number"), ("tokens", "number"), ("round trip", "number"), ("connected", "number"),
)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = (
    f"default-src 'none'; img-src data:; style-src 'sha256-{_hash(_STYLE)}'; script-src 'sha256-{_hash(_SCRIPT)}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Headrace: workers</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><main><h1>Workers of <span id="model">this gateway</span></h1>
<p>Gateway <code id="gateway">-</code>; the same for programs: <a href="v1/workers">v1/workers</a>.
<span id="state" class="lost" role="status"></span></p>
<noscript><p>This page needs JavaScript to read <a href="v1/workers">v1/workers</a>.</p></noscript>
<dl>{"".join(f'<div><dt>{text}</dt><dd id="{name}">-</dd></div>' for name, text in _CARDS)}</dl>
<h2 id="title">Who is connected</h2>
<div class="table" tabindex="0" role="region" aria-labelledby="title"><table id="workers" aria-labelledby="title">
<thead><tr>{"".join(f'<th scope="col"{" class=" + kind if kind else ""}>{text}</th>' for text, kind in _COLUMNS)}</tr></thead>
<tbody></tbody></table></div></main><script>{_SCRIPT}</script></body></html>
"""
