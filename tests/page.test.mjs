// Checks what the operators' page makes of events, in Node with a small stand-in for the browser's elements:
// `node --test tests/page.test.mjs`. `cargo xtask page` checks the page in Chromium.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

class Element {
  constructor(tag) {
    Object.assign(this, { tag, childNodes: [], dataset: {}, style: {}, attributes: {}, listeners: {}, className: "", title: "" });
    this.classList = { toggle() {} };
    this.parentElement = { hidden: false };
  }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get firstElementChild() { return this.children[0] ?? null; }
  get nextElementSibling() {
    const all = this.parent?.children ?? [];
    return all[all.indexOf(this) + 1] ?? null;
  }
  get textContent() { return this.childNodes.map((node) => (node instanceof Element ? node.textContent : node)).join(""); }
  set textContent(text) { this.childNodes = [String(text)]; }
  append(...nodes) { nodes.forEach((node) => this.insertBefore(node, null)); }
  insertBefore(node, at) {
    if (node instanceof Element) { node.remove(); node.parent = this; }
    const index = at ? this.childNodes.indexOf(at) : this.childNodes.length;
    this.childNodes.splice(index, 0, node);
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  remove() {
    if (this.parent) this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this);
    this.parent = undefined;
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  querySelector(tag) { return this.children.find((child) => child.tag === tag) ?? null; }
  contains() { return false; }
  showModal() { this.open = true; }
  close() { this.open = false; }
  focus() {}
}

function page(summary = {}) {
  const elements = new Map();
  const sent = [];
  const document = {
    createElement: (tag) => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    getElementById: (id) => elements.get(id) ?? elements.set(id, Object.assign(new Element("div"), { value: "", hidden: id === "compare" })).get(id),
    querySelectorAll: () => [],
  };
  const fetch = async (path, options = {}) => {
    if (path === "events") return new Promise(() => {});
    if (path === "decisions/summary") return { ok: true, text: async () => JSON.stringify(summary) };
    sent.push([options.method, path, options.headers.authorization]);
    return { ok: true, json: async () => ({ id: 1, draining: true }) };
  };
  const sessionStorage = { getItem: () => "s3cret", setItem() {}, removeItem() {} };
  const context = vm.createContext({ document, fetch, sessionStorage, Node: Element, AbortController, setTimeout: () => 0, clearTimeout() {}, console });
  for (const file of ["slots.js", "page.js", "compare.js"]) {
    vm.runInContext(readFileSync(new URL(`../host/gateway/src/admin/page/${file}`, import.meta.url), "utf8"), context);
  }
  const event = (kind, data) => vm.runInContext("handleBlock", context)(`event: ${kind}\ndata: ${JSON.stringify(data)}`);
  const rows = (id) => document.getElementById(id).children.map((row) => row.children.map((cell) => cell.textContent));
  return { document, event, rows, sent };
}

const worker = (id, url, more = {}) => ({
  id, models: ["tiny"], health: "healthy", draining: false, ineligible: null, engine_load: null,
  spec: { url, role: "decode", engine: "vllm" },
  ranks: [{ dp_rank: 0, active_requests: 0, active_prefill_tokens: 0, decode_blocks: 0, ttft_ewma_us: 0 }], ...more,
});
const HELLO = { version: "1", token: true, may_change: true };
const LONG = 1234567890123456;
const decision = (id, more) => ({
  id, at_ms: 0, leg: "decode", slot: "decode", model: "tiny", generation: 1, attempt: 0, mode: "active", policy: "kv-aware",
  decider: { by: "policy" }, choice: { worker: LONG, dp_rank: 0, cost: 1 }, runner_up: { worker: 7, dp_rank: 1, cost: 2 }, ...more,
});

test("a long id is shown as a short name, in workers and in decisions", () => {
  const { event, rows } = page();
  event("hello", HELLO);
  event("decisions", { on: true, decisions: [decision("1", { outcome: { code: "ok", status: 200, ttft_ms: 5 } })] });
  event("workers", { workers: [worker(LONG, "http://10.0.0.3:8000/"), worker(7, "http://10.0.0.4:8000")] });
  assert.deepEqual(rows("workers").map((cells) => cells[0]), ["10.0.0.3:800012345678…", "710.0.0.4:8000"]);
  assert.equal(rows("decisions")[0][2], "10.0.0.3:8000/0");
  assert.equal(rows("decisions")[0][6], "7/12");
  for (const cells of [...rows("workers"), ...rows("decisions")]) {
    for (const cell of cells) assert.ok(!cell.includes(String(LONG)), cell);
  }
});

test("workers whose short addresses are equal keep their ids", () => {
  const { event, rows } = page();
  const host = "http://a-very-long-host-name.example.com:8000/prefix";
  event("workers", { workers: [worker(LONG, `http://x.${host.slice(7)}`), worker(LONG + 2, `http://y.${host.slice(7)}`)] });
  assert.ok(rows("workers").every(([name]) => name.startsWith("12345678…")), String(rows("workers")));
});

test("a worker is drained and undrained with the token, after a confirmation", async () => {
  const { document, event, sent } = page();
  event("hello", HELLO);
  for (const [draining, word, method] of [[false, "Drain", "POST"], [true, "Undrain", "DELETE"]]) {
    event("workers", { workers: [worker(7, "http://10.0.0.3:8000", { draining })] });
    const button = document.getElementById("workers").children[0].children[4].children[0];
    assert.equal(button.textContent, word);
    button.listeners.click();
    assert.ok(document.getElementById("confirm").open, "it asks first");
    assert.equal(sent.length, draining ? 1 : 0, "nothing is sent before the confirmation");
    document.getElementById("yes").onclick();
    assert.deepEqual(sent.at(-1), [method, "workers/7/drain", "Bearer s3cret"]);
  }
  event("hello", { ...HELLO, may_change: false });
  event("workers", { workers: [worker(7, "http://10.0.0.3:8000")] });
  assert.equal(document.getElementById("workers").children[0].children[4].children.length, 0, "who may not change sees no button");
});

test("a shed and a refused request have ended, and others are in flight", () => {
  const { event, rows } = page();
  const refused = decision("1", { choice: null, runner_up: null, refused: { code: "shed", detail: "over quota" } });
  const shed = decision("2", { choice: null, runner_up: null, plan: { word: "shed" } });
  event("decisions", { on: true, decisions: [refused, shed, decision("3", {})] });
  assert.deepEqual(rows("decisions").map((cells) => cells.slice(7)), [["–", "–", "shed"], ["–", "–", "shed"], ["…", "…", "in flight"]]);
});

test("a slot is shown with its policy, the state of its policies and its trials", () => {
  const { document, event } = page();
  event("hello", HELLO);
  const memory = { entries: 90, entries_limit: 100, bytes: 1024, bytes_limit: 4096 };
  const shadow = { policy: "mine", generation: 4, share: 1, calls: 10, agree: 3, disagree: 1, failed: 0 };
  const slot = { slot: "decode", model: null, policy: "kv-aware", generation: 3, source: "built-in", calls: 10, failures: 0, state: "serving", parts: [], grants: ["state"], memory, refusals: [], shadow };
  event("slots", { slots: [slot], history: [], strays: [] });
  const text = document.getElementById("slots").textContent;
  for (const part of ["kv-aware", "state 90 keys, 1 of 4 KiB", "shadow mine @4", "agrees in 75 % of 4"]) assert.ok(text.includes(part), `${part}: ${text}`);
});

const lane = (name, more) => ({
  lane: name, policy: "kv-aware", native: null, generation: 1, decisions: 0, fallbacks: 0, sheds: 0, agreement: null, predicted_hit_rate: null,
  ttft_ms: null, itl_ms: null, e2e_ms: null, decisions_by_minute: [0, 0, 0], ...more,
});
const times = (p50) => ({ count: 2, p50, p90: p50 * 2, p99: p50 * 3, cdf: [[p50, 0.5], [p50 * 2, 1]] });
/** Returns all elements with a tag below a node. */
const all = (node, tag) => node.children.flatMap((child) => [...(child.tag === tag ? [child] : []), ...all(child, tag)]);

test("active, canary and shadow are compared side by side, in a table and in plots", async () => {
  const lanes = [
    lane("active", { decisions: 1000, agreement: 0.75, predicted_hit_rate: 0.5, ttft_ms: times(40), itl_ms: times(8), e2e_ms: times(900), decisions_by_minute: [400, 0, 600] }),
    lane("canary", { decisions: 20, policy: "new", generation: 2, ttft_ms: times(20), sheds: 3, decisions_by_minute: [0, 10, 10] }),
    lane("shadow", { decisions: 1000, policy: null, native: "round-robin", generation: 5, agreement: 0.75, predicted_hit_rate: 0.1, decisions_by_minute: [400, 0, 600] }),
  ];
  const { document } = page({ window_s: 3600, slots: [{ slot: "aggregated", model: null, lanes }, { slot: "decode", model: null, lanes: [lane("active", {})] }] });
  const [view, button] = ["compare", "show-compare"].map((id) => document.getElementById(id));
  await button.listeners.click();
  assert.equal(view.hidden, false);
  assert.equal(document.getElementById("compared").textContent, "the last 60 minutes");
  const cards = document.getElementById("lanes").children;
  assert.equal(cards.length, 1, "a slot without decisions and trials is left out");
  const rows = Object.fromEntries(all(cards[0], "tr").map((row) => { const [name, ...cells] = row.children.map((cell) => cell.textContent); return [name, cells]; }));
  assert.deepEqual(rows[""], ["active", "canary", "shadow"]);
  assert.deepEqual(rows.policy, ["kv-aware @1", "new @2", "round-robin @5"]);
  assert.deepEqual(rows.agrees, ["75 %", "–", "75 %"]);
  assert.deepEqual(rows["TTFT p90"], ["80 ms", "40 ms", "–"]);
  assert.deepEqual(rows["predicted hits"], ["50 %", "–", "10 %"]);
  assert.deepEqual(rows.sheds, ["0", "3", "0"]);
  const plots = all(cards[0], "svg");
  assert.deepEqual(plots.map((plot) => plot.attributes["aria-label"]), ["TTFT, share of requests: active, canary", "ITL, share of requests: active", "decisions a minute: active, canary, shadow"]);
  for (const line of plots.flatMap((plot) => all(plot, "polyline"))) {
    const points = line.attributes.points.split(" ").map((point) => point.split(",").map(Number));
    assert.ok(points.length > 2 && points.every(([x, y]) => x >= 34 && x <= 294 && y >= 6 && y <= 102), line.attributes.points);
  }
  await button.listeners.click();
  assert.equal(view.hidden, true, "a second click closes the view");
});

test("a comparison without decisions or with a failure says so", async () => {
  const { document } = page({ window_s: 3600, slots: [{ slot: "decode", model: null, lanes: [lane("active", {})] }] });
  await document.getElementById("show-compare").listeners.click();
  assert.equal(document.getElementById("compared").textContent, "no decisions in the last hour");
  assert.equal(document.getElementById("lanes").children.length, 0);
});
