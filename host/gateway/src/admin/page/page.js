// The page at the admin port's root: reads /events, shows what it says, and sends an operator's word.
// Whatever comes from policies, engines or clients is put in as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const KEY = "pointsman-token";
const state = { decisions: [], on: true, mayChange: false, token: false };

// ---- elements -------------------------------------------------------------------------------------------------

/** A new element with a class and children, which are elements or text. */
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children.map((child) => (child instanceof Node ? child : String(child ?? ""))));
  return node;
}

/** Text of a node, written only when it is another: screen readers and selections are left alone. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the children of `parent` those of `items`; a child stays the same element as long as its key does. */
function sync(parent, items, key, build, update) {
  const names = new Set(items.map(key));
  for (const child of [...parent.children]) if (!names.has(child.dataset.key)) child.remove();
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let node = known.get(name);
    known.delete(name);
    if (!node) {
      node = build(item);
      node.dataset.key = name;
    }
    const shape = JSON.stringify(item) + state.mayChange;
    if (node.shape !== shape) {
      node.shape = shape;
      update(node, item);
    }
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
}

/** A table row of so many cells. */
const row = (cells) => make("tr", "", ...Array.from({ length: cells }, () => make("td")));

/** A cell's text, with a small line below. */
function cell(node, text, small, kind) {
  node.className = kind ?? "";
  node.replaceChildren(String(text ?? "–"));
  node.title = small ? String(small) : "";
  if (small) node.append(make("small", "", small));
}

function nothing(body, columns, text) {
  const filler = make("tr", "", make("td", "none", text));
  filler.firstElementChild.colSpan = columns;
  body.replaceChildren(filler);
}

const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });
const millis = (value) =>
  value === null || value === undefined ? "–" : value < 10 ? `${number(value, 1)} ms` : value < 1e4 ? `${number(value)} ms` : `${number(value / 1e3, 1)} s`;
const clock = (at) => new Date(at).toLocaleTimeString("en-GB");
const place = (who) => (who ? `${who.worker}/${who.dp_rank}` : "–");
const short = (id) => (String(id).length > 10 ? `${String(id).slice(0, 8)}…` : String(id));

/** JSON, with whole numbers that no double holds (ids are 64 bits) as text. */
function parse(text) {
  const exact = (_, value, context) =>
    typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER && context?.source ? context.source : value;
  return JSON.parse(text, exact);
}

// ---- workers --------------------------------------------------------------------------------------------------

function showWorkers({ workers }) {
  const ready = workers.filter((worker) => !worker.ineligible).length;
  say($("eligible"), `${ready} of ${workers.length}`);
  if (!workers.length) return nothing($("workers"), 4, "no workers yet");
  const most = Math.max(4, ...workers.flatMap((worker) => worker.ranks.map((rank) => rank.active_requests)));
  sync($("workers"), workers.map((worker) => ({ ...worker, most })), (worker) => `w${worker.id}`, () => row(4), showWorker);
}

function showWorker(node, worker) {
  const [id, role, health, load] = node.children;
  cell(id, short(worker.id), worker.spec.url.replace(/^https?:\/\//, ""));
  id.title = `${worker.id} ${worker.spec.url}\n${worker.models.join(", ")}`;
  cell(role, worker.spec.role, worker.spec.engine);
  const kind = worker.ineligible ? (worker.health === "unhealthy" ? "bad" : "warn") : "good";
  cell(health, worker.health, worker.ineligible?.replaceAll("_", " "), kind);
  const total = worker.ranks.reduce((sum, rank) => sum + rank.active_requests, 0);
  const bars = make("div", worker.ranks.length > 2 ? "bars many" : "bars", ...worker.ranks.map((rank) => bar(rank, worker)));
  bars.append(make("span", "", number(total)));
  load.replaceChildren(bars);
  const { kv_usage: usage, waiting } = worker.engine_load ?? {};
  const known = usage !== null && usage !== undefined;
  if (known) load.append(make("small", "", `KV ${number(usage * 100)} %${waiting ? `, ${number(waiting)} waiting` : ""}`));
}

function bar(rank, { most, spec }) {
  const full = Math.max(spec.max_concurrency ?? 0, most);
  const fill = document.createElement("i");
  fill.style.width = `${Math.min(100, (100 * rank.active_requests) / full)}%`;
  const node = make("div", "bar", fill);
  node.setAttribute("role", "img");
  node.title =
    `rank ${rank.dp_rank}: ${rank.active_requests} requests, ${rank.active_prefill_tokens} prompt tokens, ` +
    `${rank.decode_blocks} blocks` + (rank.ttft_ewma_us ? `, TTFT ${millis(rank.ttft_ewma_us / 1e3)}` : "");
  node.setAttribute("aria-label", node.title);
  return node;
}

// ---- decisions ------------------------------------------------------------------------------------------------

function showDecisions() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = state.decisions.filter((one) => {
    const text = words.length ? searched(one) : "";
    return words.every((word) => text.includes(word));
  });
  const all = state.decisions.length;
  say($("shown"), words.length ? `${kept.length} of the newest ${all}` : all ? `the newest ${all}` : "");
  const body = $("decisions");
  if (kept.length) sync(body, kept, (one) => one.id, buildDecision, showDecision);
  else nothing(body, 10, !state.on ? "decisions are not kept: [decisions] keep = 0" : all ? "nothing fits the filter" : "no decisions yet: send a request");
}

const searched = (one) =>
  [one.id, one.request_id, one.model, one.leg, one.slot, place(one.choice), `worker=${one.choice?.worker}`, one.policy ?? "native",
    one.decider.by, one.decider.reason, one.reason, one.outcome?.code, one.refused?.code].join(" ").toLowerCase();

function buildDecision(one) {
  const node = row(10);
  const button = make("button", "", clock(one.at_ms));
  button.type = "button";
  button.setAttribute("aria-label", `receipt of the decision of ${clock(one.at_ms)}`);
  node.firstElementChild.append(button);
  node.addEventListener("click", () => openReceipt(one.id));
  return node;
}

function showDecision(node, one) {
  const [, leg, worker, policy, decider, cost, second, ttft, cached, outcome] = node.children;
  cell(leg, one.plan ? "plan" : one.leg, one.attempt ? `try ${one.attempt + 1}` : "");
  cell(worker, one.plan ? one.plan.word : one.refused ? one.refused.code : place(one.choice), "", one.refused ? "bad" : "");
  cell(policy, `${one.policy ?? "native"} @${one.generation}`, one.mode === "canary" ? "canary" : "");
  const fallback = one.decider.by === "fallback";
  cell(decider, one.decider.by, fallback ? `${one.decider.reason} ${one.decider.detail}` : one.refused?.detail || one.reason, fallback ? "warn" : "");
  cell(cost, number(one.choice?.cost, 2), "", "n");
  cell(second, one.runner_up ? place(one.runner_up) : "–", one.runner_up ? `${number(one.runner_up.cost, 2)}` : "");
  const end = one.outcome;
  cell(ttft, end ? millis(end.ttft_ms) : "…", "", "n");
  const { predicted, reported } = end?.cached_tokens ?? {};
  cell(cached, end ? `${number(predicted)} / ${number(reported)}` : "…", "", "n");
  cell(outcome, end ? (end.retried ? "tried again" : end.code) : "under way", "", end && end.status >= 400 ? "bad" : end ? "" : "dim");
}

async function openReceipt(id) {
  const response = await fetch(`decisions/${encodeURIComponent(id)}`, { headers: authorization() });
  const text = await response.text();
  let shown = text;
  const rows = [];
  try {
    const whole = parse(text);
    // Lists of numbers on one line: a matrix of facts is read by rows.
    shown = JSON.stringify(whole, null, 2).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s+/g, " ")}]`);
    (whole.candidates ?? []).forEach(([worker, rank], index) => {
      const at = whole.left ? whole.left.indexOf(index) : index;
      const word = whole.choice?.row === index ? "chosen" : whole.runner_up?.row === index ? "runner-up" : at < 0 ? "filtered out" : "";
      const line = row(4);
      [worker, rank, number(at < 0 ? null : whole.costs?.[at], 3), word].forEach((text, column) => cell(line.children[column], text, "", column === 2 ? "n" : ""));
      rows.push(line);
    });
  } catch { /* it is shown as it came */ }
  $("candidates").replaceChildren(...rows);
  $("candidates").parentElement.hidden = !rows.length;
  say($("h-receipt"), `Receipt ${id}`);
  $("json").textContent = shown;
  $("receipt").showModal();
}

// ---- an operator's word ---------------------------------------------------------------------------------------

function authorization() {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
}

function confirmed(question, path) {
  say($("question"), question);
  $("yes").onclick = () => {
    $("confirm").close();
    command(path);
  };
  $("confirm").showModal();
}

async function command(path) {
  try {
    const response = await fetch(path, { method: "POST", headers: authorization() });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) return told(`not done: ${answer.error?.message ?? response.status}`, true);
    const { changed = [], refused = [] } = answer;
    const done = `done: ${changed.length} changed${refused.length ? `, ${refused.length} refused` : ""}`;
    told(done, false);
    setTimeout(() => $("state").textContent === done && told("live", false), 6000);
  } catch {
    told("not done: the daemon cannot be reached", true);
  }
}

function told(text, bad) {
  const node = $("state");
  say(node, text);
  node.classList.toggle("bad", bad);
}

// ---- events ---------------------------------------------------------------------------------------------------

const HANDLERS = {
  hello({ version, token, may_change }) {
    [state.token, state.mayChange] = [token, may_change];
    say($("version"), version);
    $("reload").hidden = !may_change;
    $("give").hidden = may_change;
    $("forget").hidden = !(token && may_change);
    if (may_change) $("token").hidden = true;
    else if (sessionStorage.getItem(KEY)) askForToken("that is not the token");
    told("live", false);
  },
  workers: showWorkers,
  slots: showSlots,
  decisions(event) {
    [state.decisions, state.on] = [event.decisions, event.on];
    showDecisions();
  },
  pulse({ requests_per_second, ttft_p50_ms }) {
    say($("rate"), number(requests_per_second, 1));
    say($("ttft"), millis(ttft_p50_ms));
  },
};

/** One line of an event stream's block after another; what is no event of ours is passed by. */
function take(block) {
  const field = (name) => block.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  const data = field("data");
  if (data) HANDLERS[field("event")]?.(parse(data));
}

let reading = new AbortController();

/** Reads events until they end. A fetch, for an EventSource cannot send the token. */
async function read(signal) {
  const response = await fetch("events", { headers: authorization(), signal });
  if (response.status === 401 || response.status === 403) {
    askForToken(response.status === 403 ? "that is not the token" : "");
    return false;
  }
  if (!response.ok) throw new Error(String(response.status));
  const text = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await text.read();
    if (done) return true;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    blocks.forEach(take);
  }
}

async function follow() {
  reading.abort();
  const mine = (reading = new AbortController());
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    const began = Date.now();
    try {
      if (!(await read(mine.signal))) return;
    } catch { /* said below */ }
    if (mine.signal.aborted) return;
    told("not connected, trying again", true);
    if (Date.now() - began > 10000) wait = 500;
    await new Promise((done) => setTimeout(done, wait));
  }
}

function askForToken(problem) {
  sessionStorage.removeItem(KEY);
  $("token").hidden = false;
  say($("refused"), problem);
  told("a token is needed", true);
  $("secret").focus();
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("secret").value.trim());
  $("secret").value = "";
  say($("refused"), "");
  follow();
});
$("give").addEventListener("click", () => {
  $("token").hidden = false;
  $("secret").focus();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  follow();
});
$("reload").addEventListener("click", () => confirmed("Read the policy folder now?", "policies/reload"));
$("filter").addEventListener("input", showDecisions);
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
showDecisions();
follow();
