// The page at the root of the admin port: shows the events of /events and sends the operator's commands.
// Text from policies, engines and clients is inserted as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const KEY = "pointsman-token";
/** Characters of a worker's name in a table: an id of 20 digits would push the other columns away. */
const MAX_NAME = 22;
const state = { decisions: [], recording: true, mayChange: false, token: false, names: new Map() };

// ---- elements -------------------------------------------------------------------------------------------------

/** Returns a new element with a class and children, which are elements or text. */
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children.map((child) => (child instanceof Node ? child : String(child ?? ""))));
  return node;
}

/** Sets the text of a node if it differs, so that screen readers and selections are not disturbed. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes one child of `parent` for each item; an item keeps its element as long as its key stays the same. */
function syncChildren(parent, items, key, build, update) {
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

/** Returns a table row with this number of cells. */
const tableRow = (cells) => make("tr", "", ...Array.from({ length: cells }, () => make("td")));

/** Sets the text of a cell, with a small line below. */
function setCell(node, text, small, kind) {
  node.className = kind ?? "";
  node.replaceChildren(String(text ?? "–"));
  node.title = small ? String(small) : "";
  if (small) node.append(make("small", "", small));
}

/** Shows a message in place of a table's rows. */
function showEmpty(body, columns, text) {
  const filler = make("tr", "", make("td", "none", text));
  filler.firstElementChild.colSpan = columns;
  body.replaceChildren(filler);
}

const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });
const formatMillis = (value) =>
  value === null || value === undefined ? "–" : value < 10 ? `${number(value, 1)} ms` : value < 1e4 ? `${number(value)} ms` : `${number(value / 1e3, 1)} s`;
const formatTime = (at) => new Date(at).toLocaleTimeString("en-GB");
const shortId = (id) => (String(id).length > 10 ? `${String(id).slice(0, 8)}…` : String(id));
/** Returns the short name of a worker: its id when that is short, else the end of its address. */
const workerName = (id) => state.names.get(String(id)) ?? shortId(id);
const candidateName = (who) => (who ? `${workerName(who.worker)}/${who.dp_rank}` : "–");
const fullName = (who) => (who ? `worker ${who.worker}, rank ${who.dp_rank}` : "");

const addressOf = ({ spec }) => spec.url.replace(/^https?:\/\//, "").replace(/\/+$/, "");

/** Returns the short names of workers, by id. Workers whose short addresses are equal keep their ids. */
function shortNames(workers) {
  const address = (worker) => {
    const text = addressOf(worker);
    return text.length > MAX_NAME ? `…${text.slice(1 - MAX_NAME)}` : text;
  };
  const uses = new Map();
  for (const worker of workers) uses.set(address(worker), (uses.get(address(worker)) ?? 0) + 1);
  const nameOf = (worker) =>
    String(worker.id).length <= 10 || uses.get(address(worker)) > 1 ? shortId(worker.id) : address(worker);
  return new Map(workers.map((worker) => [String(worker.id), nameOf(worker)]));
}

/** Parses JSON; integers that exceed a double (ids have 64 bits) become text. */
function parse(text) {
  const exact = (_, value, context) =>
    typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER && context?.source ? context.source : value;
  return JSON.parse(text, exact);
}

// ---- workers --------------------------------------------------------------------------------------------------

function showWorkers({ workers }) {
  const ready = workers.filter((worker) => !worker.ineligible && !worker.paused).length;
  setText($("eligible"), `${ready} of ${workers.length}`);
  const names = shortNames(workers);
  const renamed = JSON.stringify([...names]) !== JSON.stringify([...state.names]);
  state.names = names;
  if (renamed && state.decisions.length) {
    $("decisions").replaceChildren();
    showDecisions();
  }
  if (!workers.length) return showEmpty($("workers"), 5, "no workers yet");
  const most = Math.max(4, ...workers.flatMap((worker) => worker.ranks.map((rank) => rank.active_requests)));
  syncChildren($("workers"), workers.map((worker) => ({ ...worker, most })), (worker) => `w${worker.id}`, () => tableRow(5), showWorker);
}

function showWorker(node, worker) {
  const [id, role, health, load, commands] = node.children;
  const [name, address] = [workerName(worker.id), addressOf(worker)];
  setCell(id, name, name === address ? shortId(worker.id) : address, "name");
  id.title = `${worker.id} ${worker.spec.url}\n${worker.models.join(", ")}`;
  setCell(role, worker.spec.role, worker.spec.engine);
  const reason = worker.ineligible ?? (worker.paused ? "paused" : null);
  const kind = reason ? (worker.health === "unhealthy" ? "bad" : "warn") : "good";
  setCell(health, worker.health, reason?.replaceAll("_", " "), kind);
  const total = worker.ranks.reduce((sum, rank) => sum + rank.active_requests, 0);
  const bars = make("div", worker.ranks.length > 2 ? "bars many" : "bars", ...worker.ranks.map((rank) => bar(rank, worker)));
  bars.append(make("span", "", number(total)));
  load.replaceChildren(bars);
  const { kv_usage: usage, waiting } = worker.engine_load ?? {};
  commands.replaceChildren(...(state.mayChange ? [drainButton(worker, name)] : []));
  const known = usage !== null && usage !== undefined;
  if (known) load.append(make("small", "", `KV ${number(usage * 100)} %${waiting ? `, ${number(waiting)} waiting` : ""}`));
}

/** Returns the button that drains a worker, or ends its drain. */
function drainButton(worker, name) {
  const [word, method, question] = worker.draining
    ? ["Undrain", "DELETE", `Send requests to ${name} again?`]
    : ["Drain", "POST", `Drain ${name}? It gets no new request; those in flight finish.`];
  const button = make("button", "", word);
  button.type = "button";
  button.setAttribute("aria-label", `${word} ${name}`);
  button.addEventListener("click", () => askToConfirm(question, `workers/${worker.id}/drain`, method));
  return button;
}

function bar(rank, { most, spec }) {
  const full = Math.max(spec.max_concurrency ?? 0, most);
  const fill = document.createElement("i");
  fill.style.width = `${Math.min(100, (100 * rank.active_requests) / full)}%`;
  const node = make("div", "bar", fill);
  node.setAttribute("role", "img");
  node.title =
    `rank ${rank.dp_rank}: ${rank.active_requests} requests, ${rank.active_prefill_tokens} prompt tokens, ` +
    `${rank.decode_blocks} blocks` + (rank.ttft_ewma_us ? `, TTFT ${formatMillis(rank.ttft_ewma_us / 1e3)}` : "");
  node.setAttribute("aria-label", node.title);
  return node;
}

// ---- decisions ------------------------------------------------------------------------------------------------

function showDecisions() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kept = state.decisions.filter((one) => {
    const text = words.length ? searchText(one) : "";
    return words.every((word) => text.includes(word));
  });
  const all = state.decisions.length;
  setText($("shown"), words.length ? `${kept.length} of the newest ${all}` : all ? `the newest ${all}` : "");
  const body = $("decisions");
  if (kept.length) syncChildren(body, kept, (one) => one.id, buildDecision, showDecision);
  else showEmpty(body, 10, !state.recording ? "decisions are not recorded: [decisions] keep = 0" : all ? "no decision matches the filter" : "no decisions yet: send a request");
}

const searchText = (one) =>
  [one.id, one.request_id, one.model, one.leg, one.slot, candidateName(one.choice), one.choice?.worker, `worker=${one.choice?.worker}`, one.policy ?? "native",
    one.decider.by, one.decider.reason, one.reason, one.outcome?.code, one.refused?.code].join(" ").toLowerCase();

function buildDecision(one) {
  const node = tableRow(10);
  const button = make("button", "", formatTime(one.at_ms));
  button.type = "button";
  button.setAttribute("aria-label", `receipt of the decision of ${formatTime(one.at_ms)}`);
  node.firstElementChild.append(button);
  node.addEventListener("click", () => openReceipt(one.id));
  return node;
}

function showDecision(node, one) {
  const [, leg, worker, policy, decider, cost, second, ttft, cached, outcome] = node.children;
  setCell(leg, one.plan ? "plan" : one.leg, one.attempt ? `attempt ${one.attempt + 1}` : "");
  setCell(worker, one.plan ? one.plan.word : one.refused ? one.refused.code : candidateName(one.choice), "", one.refused ? "bad" : "name");
  worker.title = fullName(one.choice);
  setCell(policy, `${one.policy ?? "native"} @${one.generation}`, one.mode === "canary" ? "canary" : "");
  const fallback = one.decider.by === "fallback";
  setCell(decider, one.decider.by, fallback ? `${one.decider.reason} ${one.decider.detail}` : one.refused?.detail || one.reason, fallback ? "warn" : "");
  setCell(cost, number(one.choice?.cost, 2), "", "n");
  setCell(second, one.runner_up ? candidateName(one.runner_up) : "–", one.runner_up ? `${number(one.runner_up.cost, 2)}` : "", "name");
  second.title = fullName(one.runner_up);
  const end = one.outcome;
  // A request that was shed or refused has ended, whether or not an outcome was recorded.
  const open = !end && !one.refused && one.plan?.word !== "shed";
  setCell(ttft, end ? formatMillis(end.ttft_ms) : open ? "…" : "–", "", "n");
  const { predicted, reported } = end?.cached_tokens ?? {};
  setCell(cached, end ? `${number(predicted)} / ${number(reported)}` : open ? "…" : "–", "", "n");
  const ended = end ? (end.retried ? "retried" : end.code) : one.refused?.code ?? "shed";
  setCell(outcome, open ? "in flight" : ended, "", open ? "dim" : !end || end.status >= 400 ? "bad" : "");
}

async function openReceipt(id) {
  const response = await fetch(`decisions/${encodeURIComponent(id)}`, { headers: authorization() });
  const text = await response.text();
  let shown = text;
  const rows = [];
  try {
    const whole = parse(text);
    // One line for each list of numbers, so that a matrix of facts reads by rows.
    shown = JSON.stringify(whole, null, 2).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s+/g, " ")}]`);
    (whole.candidates ?? []).forEach(([worker, rank], index) => {
      const at = whole.left ? whole.left.indexOf(index) : index;
      const mark = whole.choice?.row === index ? "chosen" : whole.runner_up?.row === index ? "runner-up" : at < 0 ? "filtered out" : "";
      const line = tableRow(4);
      line.title = `worker ${worker}`;
      [workerName(worker), rank, number(at < 0 ? null : whole.costs?.[at], 3), mark].forEach((text, column) => setCell(line.children[column], text, "", column === 2 ? "n" : ""));
      rows.push(line);
    });
  } catch { /* not JSON: shown unchanged */ }
  $("candidates").replaceChildren(...rows);
  $("candidates").parentElement.hidden = !rows.length;
  setText($("h-receipt"), `Receipt ${id}`);
  $("json").textContent = shown;
  $("receipt").showModal();
}

// ---- commands -------------------------------------------------------------------------------------------------

function authorization() {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
}

function askToConfirm(question, path, method = "POST") {
  setText($("question"), question);
  $("yes").onclick = () => {
    $("confirm").close();
    sendCommand(path, method);
  };
  $("confirm").showModal();
}

async function sendCommand(path, method) {
  try {
    const response = await fetch(path, { method, headers: { ...authorization(), "content-type": "application/json" } });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) return setStatus(`failed: ${answer.error?.message ?? response.status}`, true);
    const { changed, refused = [], strays = [] } = answer;
    const also = [refused.length ? `${refused.length} refused` : "", strays.length ? `${strays.length} of no slot` : ""];
    const done = changed ? `done: ${[`${changed.length} changed`, ...also].filter(Boolean).join(", ")}` : "done";
    setStatus(done, false);
    setTimeout(() => $("state").textContent === done && setStatus("live", false), 6000);
  } catch {
    setStatus("failed: the gateway does not answer", true);
  }
}

function setStatus(text, bad) {
  const node = $("state");
  setText(node, text);
  node.classList.toggle("bad", bad);
}

// ---- events ---------------------------------------------------------------------------------------------------

const HANDLERS = {
  hello({ version, token, may_change }) {
    [state.token, state.mayChange] = [token, may_change];
    setText($("version"), version);
    $("reload").hidden = !may_change;
    $("give").hidden = may_change;
    $("forget").hidden = !(token && may_change);
    if (may_change) $("token").hidden = true;
    else if (sessionStorage.getItem(KEY)) askForToken("wrong token");
    setStatus("live", false);
  },
  workers: showWorkers,
  slots: showSlots,
  decisions(event) {
    [state.decisions, state.recording] = [event.decisions, event.on];
    showDecisions();
  },
  stats({ requests_per_second, ttft_p50_ms }) {
    setText($("rate"), number(requests_per_second, 1));
    setText($("ttft"), formatMillis(ttft_p50_ms));
  },
};

/** Handles one block of the event stream; ignores unknown events. */
function handleBlock(block) {
  const field = (name) => block.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  const data = field("data");
  if (data) HANDLERS[field("event")]?.(parse(data));
}

let reading = new AbortController();

/** Reads events until the stream ends. It uses fetch because an EventSource cannot send the token. */
async function readEvents(signal) {
  const response = await fetch("events", { headers: authorization(), signal });
  if (response.status === 401 || response.status === 403) {
    askForToken(response.status === 403 ? "wrong token" : "");
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
    blocks.forEach(handleBlock);
  }
}

async function connect() {
  reading.abort();
  const mine = (reading = new AbortController());
  for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
    const began = Date.now();
    try {
      if (!(await readEvents(mine.signal))) return;
    } catch { /* reported below */ }
    if (mine.signal.aborted) return;
    setStatus("disconnected, reconnecting", true);
    if (Date.now() - began > 10000) wait = 500;
    await new Promise((done) => setTimeout(done, wait));
  }
}

function askForToken(problem) {
  sessionStorage.removeItem(KEY);
  $("token").hidden = false;
  setText($("refused"), problem);
  setStatus("token required", true);
  $("secret").focus();
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("secret").value.trim());
  $("secret").value = "";
  setText($("refused"), "");
  connect();
});
$("give").addEventListener("click", () => {
  $("token").hidden = false;
  $("secret").focus();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  connect();
});
$("reload").addEventListener("click", () => askToConfirm("Reload the policy directory now?", "policies/reload"));
$("filter").addEventListener("input", showDecisions);
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
showDecisions();
connect();
