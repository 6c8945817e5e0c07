// Checks what the operators' page makes of the gateway's answers, in Node with a small stand-in for the browser's
// elements: `node --test tests/page.test.mjs`. `cargo xtask page` checks the page in Chromium.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { pathToFileURL } from "node:url";

/** A text with its no-break spaces as spaces. */
const plain = (text) => text.replaceAll("\u00a0", " ");

class Text {
  constructor(data) { Object.assign(this, { nodeType: 3, data }); }
  get textContent() { return plain(this.data); }
  remove() { this.parentNode.childNodes = this.parentNode.childNodes.filter((node) => node !== this); }
}

class Element {
  constructor(tag) {
    Object.assign(this, { nodeType: 1, nodeName: tag, tag, tagName: tag.toUpperCase(), childNodes: [], dataset: {}, listeners: {}, className: "", hidden: false, isPointed: false });
    this.attributes = Object.create({ *[Symbol.iterator]() { for (const [name, value] of Object.entries(this)) yield { name, value }; } });
    this.style = { setProperty: (name, value) => { this.style[name] = value; } };
    this.classList = { toggle() {}, add() {}, remove() {} };
  }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get firstChild() { return this.childNodes[0] ?? null; }
  get lastChild() { return this.childNodes.at(-1) ?? null; }
  get firstElementChild() { return this.children[0] ?? null; }
  get nextElementSibling() { const all = this.parentNode?.children ?? []; return all[all.indexOf(this) + 1] ?? null; }
  get textContent() { return this.childNodes.map((node) => node.textContent).join(""); }
  set textContent(text) { this.replaceChildren(String(text)); }
  append(...nodes) { nodes.forEach((node) => this.insertBefore(node, null)); }
  insertBefore(node, at) {
    const child = typeof node === "string" ? new Text(node) : node;
    if (child.parentNode) child.remove();
    child.parentNode = this;
    this.childNodes.splice(at ? this.childNodes.indexOf(at) : this.childNodes.length, 0, child);
  }
  replaceChildren(...nodes) {
    for (const node of this.childNodes) node.parentNode = null;
    this.childNodes = [];
    this.append(...nodes);
  }
  replaceChild(node, old) {
    if (node.parentNode) node.remove();
    this.childNodes[this.childNodes.indexOf(old)] = node;
    [node.parentNode, old.parentNode] = [this, null];
  }
  remove() {
    if (this.parentNode) this.parentNode.childNodes = this.parentNode.childNodes.filter((node) => node !== this);
    this.parentNode = null;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name === "class") this.className = value;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
  }
  getAttribute(name) { return name === "class" ? this.className : this.attributes[name] ?? null; }
  hasAttribute(name) { return name in this.attributes; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  /** Finds descendants by tag, class or an attribute of data; that is all the page asks for here. */
  querySelectorAll(what) {
    const data = /^\[data-(\w+)="(.*)"\]$/.exec(what);
    const isWanted = (node) => (data ? node.dataset[data[1]] === data[2] : node.tag === what || node.className.split(" ").includes(what.slice(1)));
    return this.children.flatMap((child) => [...(isWanted(child) ? [child] : []), ...child.querySelectorAll(what)]);
  }
  querySelector(what) { return this.querySelectorAll(what)[0] ?? null; }
  contains(node) { return node === this || this.children.some((child) => child.contains(node)); }
  matches() { return this.isPointed; }
  showModal() { this.open = true; }
  close() { this.open = false; }
  focus() {}
}

const FOLDER = new URL("../host/gateway/src/admin/page/", import.meta.url);
const copy = mkdtempSync(join(tmpdir(), "pointsman-page-"));
cpSync(FOLDER, copy, { recursive: true });
writeFileSync(join(copy, "package.json"), '{ "type": "module" }');
after(() => rmSync(copy, { recursive: true }));

const byId = new Map(), sent = [];
globalThis.Node = Element;
globalThis.location = { host: "gateway-2:9090" };
globalThis.document = {
  createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag), hidden: false, activeElement: null,
  getElementById: (id) => byId.get(id) ?? byId.set(id, new Element("div")).get(id),
};
globalThis.sessionStorage = { getItem: () => "s3cret", setItem() {}, removeItem() {} };
let answers = async () => ({ ok: true, text: async () => "{}" });
globalThis.fetch = async (path, { method = "GET", headers }) => {
  sent.push([method, path, headers.authorization]);
  return answers(path);
};
/** What the gateway answers: JSON, or a status without it. */
const ok = (value) => ({ ok: true, text: async () => JSON.stringify(value) }), status = (code) => ({ ok: false, status: code, text: async () => "" });
/** Lets what waits for answers go on. */
const settle = async () => { for (let turn = 0; turn < 20; turn += 1) await null; };
const load = (name) => import(pathToFileURL(join(copy, name)));
const [format, store, requests, receipts, lanes, dialogs, charts, worker, slot, fleet, overview, api, request] = await Promise.all(
  ["format", "store", "requests", "receipt", "lanes", "dialogs", "charts", "worker", "slot", "fleet", "overview", "api", "request"].map((name) => load(`${name}.js`)));

const LONG = "12345678901234567890";
const HOSTILE = "<img src=x onerror=alert(1)>";
const row = (id, more) => ({ id, url: `http://10.0.0.${id.length}:8000/`, role: "prefill", zone: "a", out: null, reason: null, legs: 100, failed: 0, in_flight: 2, limit: 16, kv: 0.5, ranks: 1, models: 1, ...more });
/** Takes a fleet as the gateway tells it: rows without names. */
const takeFleet = (workers) => store.take("fleet", { columns: Object.keys(row("1")), workers: workers.map((worker) => Object.values(worker)) });
const decision = (id, more) => ({
  id, at_ms: 1000, request_id: "r1", leg: "decode", slot: "decode", model: "tiny", generation: 1, attempt: 0, mode: "active", policy: "kv-aware", reason: "", eligible: 2,
  decider: { by: "policy" }, choice: { worker: 7, dp_rank: 0, cost: 1 }, runner_up: { worker: 8, dp_rank: 1, cost: 2 }, shadow: null, plan: null, refused: null, outcome: null, ...more,
});
const NO_TIMES = { queued: null, prefill_sent: null, prefill_ended: null, answer_sent: null };
const outcome = (more) => ({
  status: 200, code: "ok", retried: false, ttft_ms: 100, itl_ms: 10, output_tokens: 11, prompt_tokens: 160, ended_at_ms: 9000, duration_ms: 200,
  cached_tokens: { predicted: 96, reported: 80 }, times_ms: NO_TIMES, ...more,
});

test("figures have their unit and lose nothing that matters", () => {
  assert.deepEqual([0.4, 7.31, 184.2, 1040, 12_345].map((value) => plain(format.millis(value))), ["400 µs", "7.3 ms", "184 ms", "1.04 s", "12.3 s"]);
  assert.deepEqual([null, 0, 0.9996, 1, 0.9992].map((share) => plain(format.percent(share, 2))), ["–", "0 %", "99.96 %", "100 %", "99.92 %"]);
  assert.equal(format.percent(0.99999, 2), "99.99\u00a0%", "what is not all is not shown as all");
});

test("a long id is shown as the worker's address, and equal addresses keep their ids", () => {
  takeFleet([row(LONG, { url: "http://10.0.0.3:8000/" }), row("7", {})]);
  assert.deepEqual([store.nameOf(LONG), store.nameOf("7"), store.called("7", true), store.rankName("7", 2)], ["10.0.0.3:8000", "7", "Worker 7", "7/2"]);
  takeFleet([row(LONG, { url: "http://same" }), row("98765432109876543210", { url: "http://same" })]);
  assert.equal(store.nameOf(LONG), "12345678…");
});

test("the decisions of a request are one row, with the outcome that counts", () => {
  const prefill = decision("2", { leg: "prefill", slot: "prefill", choice: { worker: 1, dp_rank: 1, cost: 1 }, shadow: { generation: 4, choice: [3, 0], agrees: false } });
  const first = decision("3", { outcome: outcome({ status: 502, code: "engine_failed", retried: true }) });
  const second = decision("4", { attempt: 1, choice: { worker: 9, dp_rank: 0, cost: 1 }, outcome: outcome() });
  const plan = decision("1", { slot: "decode-override", plan: { word: "remote" }, choice: null });
  const [one, ...others] = requests.group([second, first, prefill, plan]);
  assert.equal(others.length, 0);
  assert.deepEqual([one.state, one.ids.length, one.at_ms], [["ok", "ok"], 4, 1000]);
  assert.deepEqual(one.workers.map(({ leg, id, rank }) => [leg, id, rank]), [["prefill", "1", 1], ["decode", "9", 0]]);
  assert.deepEqual(one.notes, ["2 attempts", "shadow would have chosen 3"]);
  assert.ok(requests.matches(one, ["prefill", "kv-aware"]) && !requests.matches(one, ["round-robin"]));
});

test("a client that uses one id for several requests has a row for each", () => {
  const found = requests.group([decision("5", { leg: "aggregated" }), decision("4", { leg: "aggregated", outcome: outcome({ ended_at_ms: 5 }) }), decision("3", { leg: "aggregated", outcome: outcome({ ended_at_ms: 4 }) })]);
  assert.deepEqual(found.map((one) => [one.id, one.state[0]]), [["5", "open"], ["4", "ok"], ["3", "ok"]]);
});

test("a shed and a refused request have ended, others are in flight, and some were never routed", () => {
  const refused = decision("1", { choice: null, refused: { code: "shed", detail: "over quota" } });
  const shed = decision("2", { request_id: "r2", choice: null, plan: { word: "shed" } });
  const found = requests.group([decision("3", { request_id: "r3" }), shed, refused]);
  assert.deepEqual(found.map((one) => one.state), [["open", "in flight"], ["refused", "shed"], ["refused", "shed"]]);
  const [over] = requests.unrouted([{ request_id: "r4", model: "tiny", outcome: outcome({ status: 429, code: "rate_limited", ttft_ms: null }) }]);
  assert.deepEqual([over.state, over.id, over.workers], [["refused", "429 rate limited"], null, []]);
});

test("the time of a request is told by phase, without gaps", () => {
  const told = (more) => requests.phases({ outcome: outcome(more) }).map(({ kind, from, to }) => `${kind} ${from}-${to}`);
  assert.deepEqual(told({ times_ms: { queued: 20, prefill_sent: 25, prefill_ended: 70, answer_sent: 72 } }), ["gateway 0-5", "queue 5-25", "prefill 25-70", "transfer 70-100", "decode 100-200"]);
  assert.deepEqual(told({ times_ms: { ...NO_TIMES, answer_sent: 2 } }), ["gateway 0-2", "prefill 2-100", "decode 100-200"]);
  assert.deepEqual(told({ ttft_ms: null, times_ms: { ...NO_TIMES, answer_sent: 2 } }), ["gateway 0-2", "whole 2-200"]);
  assert.deepEqual(told({ ttft_ms: null, times_ms: { ...NO_TIMES, prefill_sent: 2 }, status: 502 }), ["gateway 0-2", "prefill 2-200"]);
  // Both legs run together, and the prefill leg ends last.
  assert.deepEqual(told({ times_ms: { ...NO_TIMES, prefill_sent: 2, answer_sent: 3, prefill_ended: 120 } }), ["gateway 0-2", "prefill 2-120", "decode 100-200"]);
  assert.deepEqual(told({ ttft_ms: null, times_ms: { ...NO_TIMES, queued: 200 }, status: 503 }), ["queue 0-200"]);
  assert.deepEqual(told({ ttft_ms: null, status: 429 }), []);
});

const receipt = (more) => ({
  ...decision("1", { leg: "prefill", slot: "prefill", choice: { row: 1, worker: 2, dp_rank: 0, cost: 15.5 }, runner_up: { row: 0, worker: 1, dp_rank: 0, cost: 22 }, shadow: { generation: 9, choice: [1, 0], agrees: false } }),
  took_us: 41, candidates: [[1, 0], [2, 0], [3, 0]], left: [0, 1], costs: [22, 15.5], sentences: ["Decision 1.", "Slot prefill ran policy kv-aware.", `Because ${HOSTILE}.`, "The request ended."],
  stages: [{
    policy: "kv-aware", kept: [0, 1], rows: 2,
    request: { "prompt-tokens": 160, "block-size": 16, "overlap-score-credit": 1, "host-cache-credit": 0.75, "disk-cache-credit": 0.25, "prefill-load-scale": 1, "active-request-weight": 0.5, "track-prefill-tokens": 1 },
    workers: { "active-prefill-tokens": [16, 8], "decode-blocks": [10, 10], "active-requests": [2, 0], "cached-blocks-device": [0, 5], "taint-preference": [0, 0], "ttft-ewma-us": [1000, 2000] },
  }], ...more,
});

test("a cost of kv-aware is split into its terms, and only when they add up", () => {
  const rows = receipts.candidates(receipt());
  assert.deepEqual(rows.map((one) => [one.worker, one.cost, one.chosen, one.second, one.shadow, one.filtered]), [["2", 15.5, true, false, false, false], ["1", 22, false, true, true, false], ["3", null, false, false, false, true]]);
  assert.deepEqual(rows[0].parts, { compute: 5, before: 0.5, heldBar: 10, active: 0 });
  assert.deepEqual(rows[1].parts, { compute: 10, before: 1, heldBar: 10, active: 1 });
  assert.equal(receipts.costParts(receipt(), rows[0].facts, 99), null, "another cost than that of the formula");
  assert.equal(receipts.candidates(receipt({ stages: [{ ...receipt().stages[0], policy: "mine" }] }))[0].parts, null);
});

test("a cost of predicted-latency is split into its terms, also with a measured speed, and only when they add up", () => {
  // Cases of policies/predicted-latency/cases.toml.
  const request = { "prompt-tokens": 1000, "block-size": 100, "overlap-score-credit": 1, "prefill-load-scale": 1, "track-prefill-tokens": 1 };
  const predicted = (costs, workers, leg = "prefill", state = undefined) => receipts.candidates(receipt({ leg, left: null, costs, candidates: costs.map((_, row) => [row, 0]), choice: { row: 0 }, stages: [{ policy: "predicted-latency", request, workers, state }] }));
  const load = { "active-prefill-tokens": [0, 500], "decode-blocks": [10, 20], "active-requests": [0, 2], "cached-blocks-device": [0, 6] };
  const parts = (rows) => rows.map((one) => one.parts && Object.fromEntries(Object.entries(one.parts).map(([part, value]) => [part, Math.round(value)])));
  assert.deepEqual(parts(predicted([1080, 2320], load)), [{ compute: 1000, before: 0, heldBar: 80, active: 0 }, { compute: 400, before: 1500, heldBar: 160, active: 260 }]);
  assert.deepEqual(parts(predicted([1081, 2720], load)), [{ compute: 1000, before: 0, heldBar: 80, active: 0 }, null], "other settings");
  const measured = { "prefill-us-per-ktoken": [20000, 40000, 0], "ttft-ewma-us": [50000, 150000, 0] };
  assert.deepEqual(parts(predicted([666.667, 1333.333, 1000], measured)).map(({ compute }) => compute), [667, 1000, 1333]);
  assert.deepEqual(parts(predicted([1000, 1000, 1000], measured)).map(({ compute }) => compute), [1000, 1000, 1000], "a decision that explores");
  assert.deepEqual(parts(predicted([500, 1500], { "itl-ewma-us": [10000, 30000] }, "decode")).map(({ compute }) => compute), [500, 1500]);
  assert.deepEqual(parts(predicted([500, 1333.333], { "itl-ewma-us": [10000, 30000], "prefill-us-per-ktoken": [10000, 20000] }, "aggregated")).map((part) => part?.compute ?? null), [null, 1333]);
  assert.deepEqual(parts(predicted([2000, 1480], { "decode-blocks": [0, 20], "active-requests": [0, 2], "cached-blocks-device": [0, 6] }, "prefill", { answer: 1024000 })), [null, { compute: 400, before: 0, heldBar: 640, active: 440 }]);
  request["track-prefill-tokens"] = 0;
  assert.deepEqual(parts(predicted([280, 200], { "decode-blocks": [10, 20], "cached-blocks-device": [0, 8] }, "decode")), [{ compute: 200, before: 0, heldBar: 80, active: 0 }, { compute: 40, before: 0, heldBar: 160, active: 0 }], "what is transferred");
});

test("a receipt shows its sentences, candidates with facts, and what the shadow would have chosen", () => {
  store.take("slots", { slots: [{ slot: "prefill", model: null, refusals: [], shadow: { policy: "mine", generation: 9, agree: 3, disagree: 1, failed: 0, shed: 0 }, canary: { generation: 5 } }], history: [], strays: [], compiling: [] });
  const card = receipts.receiptCard(receipt());
  const text = card.textContent;
  for (const part of ["Prefill leg", `Because ${HOSTILE}.`, "chosen", "runner-up", "filtered out", "cached blocks", "tokens waiting", "TTFT there", "mine would have chosen 1: 6.50 dearer", "it agrees in 75 % of its decisions", "canary @5was not asked"]) assert.ok(text.includes(part), `${part}: ${text}`);
  assert.equal(card.querySelectorAll("img").length, 0);
});

test("t8 each answer of a shadow is told in words, and beside the slot that decided", () => {
  const trial = (policy) => ({ policy, generation: 9, agree: 3, disagree: 1, failed: 0, shed: 0 });
  const slotOf = (slot, model, policy) => ({ slot, model, refusals: [], shadow: trial(policy), canary: null });
  store.take("slots", { slots: [slotOf("prefill", null, "shared"), slotOf("prefill", "big", "mine"), slotOf("decode-override", null, "planner")], history: [], strays: [], compiling: [] });
  const told = (shadow, more) => receipts.receiptCard(receipt({ model: "lora-x", slot_model: "big", shadow: { generation: 9, choice: null, agrees: false, ...shadow }, ...more })).textContent;
  const plan = { slot: "decode-override", slot_model: null, plan: { word: "remote" }, choice: null };
  for (const [text, shadow, more] of [
    ["mine would have chosen the same worker.", { answer: "chose", choice: [2, 0], agrees: true }],
    ["mine would have chosen 1", { answer: "chose", choice: [1, 0] }],
    ["mine would have refused it with 429.", { answer: "refused", status: 429 }],
    ["mine would have refused it: its filters dropped every candidate.", { answer: "nobody_left" }],
    ["mine failed (trap).", { answer: "failed", kind: "trap" }],
    ["mine abstained.", { answer: "abstained" }],
    ["planner would have answered remote, the same.", { answer: "chose", plan: "remote", agrees: true }, plan],
    ["planner would have answered local, another plan.", { answer: "chose", plan: "local" }, plan],
    ["planner would have refused it with 503.", { answer: "refused", status: 503, plan: "shed" }, plan],
  ]) {
    // T8.2
    assert.ok(told(shadow, more).includes(text), `${text}: ${told(shadow, more)}`);
  }
  // T8.4
  assert.ok(told({ answer: "abstained" }).includes("slot prefill of big") && told({ answer: "abstained" }, { slot_model: null }).includes("shared abstained."), told({ answer: "abstained" }));
});

test("candidates of which nothing is recorded are one line", () => {
  const card = receipts.receiptCard(receipt({ costs: null, left: null, choice: { row: 1, worker: 2, dp_rank: 0, cost: null }, runner_up: null, stages: [] }));
  assert.ok(card.textContent.includes("3 candidates: 2/0 (chosen), 1/0 (shadow’s choice), 3/0No costs are recorded: POST /v1/route"), card.textContent);
  assert.equal(card.querySelectorAll("table").length, 0);
});

test("a worker that gets nearly everything is told, whether the fleet is small or large", () => {
  const even = (count) => Array.from({ length: count }, (_, place) => row(`${place + 10}`, { legs: 10 }));
  takeFleet([row("1", { legs: 95 }), row("2", { legs: 5 })]);
  assert.deepEqual(store.notable().map(({ worker: { id }, text }) => [id, plain(text)]), [["1", "gets 95 % of all prefill legs"]]);
  takeFleet([row("1", { legs: 60 }), row("2", { legs: 40 })]);
  assert.deepEqual(store.notable(), []);
  takeFleet([row("1", { legs: 80, ranks: 4 }), row("2", { legs: 20 })]);
  const [four, one] = ["1", "2"].map((id) => store.store.byId.get(id));
  assert.deepEqual([four.share, one.share, four.part, four.even], [1, 1, 0.8, 0.8], "a share is even by ranks");
  assert.equal(plain(store.takes(four, true)), "Worker 1 (4 ranks) takes 80.0 % of the prefill legs; its even share is 80.0 %");
  assert.match(charts.spread("prefill").textContent, /2 workers with 5 ranks, highest share first/);
  assert.deepEqual([store.rankName("1", 0), store.rankName("2", 0), store.rankName("1", null)], ["1/0", "2", "1"]);
  takeFleet([row("1", { legs: 1000 }), row("2", { out: "not_ready", reason: HOSTILE, legs: 0 }), row("3", { failed: 3, legs: 10 }), row("4", { out: "not_ready", legs: 0 }), ...even(98)]);
  assert.deepEqual(store.notable().map(({ worker: { id }, kind, text }) => [id, kind, plain(text)]), [["1", "warn", "gets 50 times its share"], ["3", "bad", "failed 3 of its 10 legs in five minutes"], ["2", "bad", `not ready: ${HOSTILE}`]]);
  assert.deepEqual(store.problems().map(({ title, text }) => [plain(title), plain(text)]), [["Worker 3 failed 3 of its 10 legs in five minutes", ""], ["2 workers are not ready", `Worker 2: ${HOSTILE}`], ["Worker 1 gets 50 times its share", "Worker 1 takes 50.3 % of the prefill legs; its even share is 1.0 %"]]);
  assert.ok(store.problems()[0].bad, "failures come first");
  assert.equal(charts.spread("prefill").querySelectorAll("rect").length, 16, "the 16 busiest stand alone");
});

test("m6 a few failed legs raise no alarm, nor do those of a worker that is out, and a share is of the worker's own legs", () => {
  // M6.2
  const alarms = (more) => {
    takeFleet([row("1", more), row("2", { legs: more.legs })]);
    return store.notable().map(({ text }) => plain(text));
  };
  assert.deepEqual(alarms({ failed: 1, legs: 176 }), []);
  assert.deepEqual(alarms({ failed: 2, legs: 2 }), [], "two failures");
  assert.deepEqual(alarms({ failed: 4, legs: 100 }), [], "less than one in 20");
  assert.deepEqual(alarms({ failed: 5, legs: 100 }), ["failed 5 of its 100 legs in five minutes"]);
  assert.deepEqual(alarms({ failed: 9, legs: 100, out: "draining" }), ["draining, 2 requests left"]);
  takeFleet([row("1", { failed: 3, legs: 12 }), row("2", { legs: 0 })]);
  assert.deepEqual(store.store.workers.map((worker) => overview.workerRow(worker).querySelectorAll("td")[4].textContent), ["25.0 %", "–"]);
});

test("m6 a drained worker whose engine is stopped is shown as drained, and not as a failure", () => {
  const drained = { out: "draining", in_flight: 0, reason: "GET http://a/health: connection refused" };
  takeFleet([row("1", drained), row("2", drained), row("3", { out: "draining", in_flight: 1 }), row("4", { out: "unhealthy" })]);
  const shown = (id) => overview.workerRow(store.store.byId.get(id), undefined).children.at(-1);
  // M6.11
  assert.deepEqual(["1", "3", "4"].map((id) => [shown(id).className, shown(id).textContent]), [["why dim", "drained"], ["why dim", "draining, 1 request left"], ["why bad", "unhealthy"]]);
  assert.equal(store.outText({ out: "draining", reason: null, in_flight: 0 }), "drained", "its engine is up");
  assert.equal(store.notable()[0].text, `drained: ${drained.reason}`);
  assert.deepEqual(store.problems().map(({ title }) => title), ["Worker 4 is unhealthy"]);
});

test("a slot is not idle because its last summary is older than its policy", () => {
  const one = { slot: "prefill", model: null, generation: 2, policy: "mine", since_ms: 0, canary: null, shadow: null, refusals: [] };
  store.take("slots", { slots: [one], history: [], strays: [], compiling: [] });
  const lane = { lane: "active", generation: 1, decisions: 9, decisions_by_minute: [4, 5] };
  const shown = (decisions) => overview.slotsCard({ slots: [{ slot: "prefill", model: null, lanes: [{ ...lane, decisions }] }] });
  assert.equal(shown(9).querySelectorAll("tr").length, 2, shown(9).textContent);
  assert.ok(shown(0).textContent.includes("No slot decided"), shown(0).textContent);
});

test("a policy that no worker's role uses is a warning at its slot", () => {
  takeFleet([]);
  store.take("stats", { reasons: ["policy mine is in slot prefill, which decides nothing: no worker has the role prefill"] });
  const [told] = store.problems();
  assert.deepEqual([told.bad, told.href, told.title, told.text], [false, "#slot/prefill", "Policy mine is in slot prefill, which decides nothing", "no worker has the role prefill"]);
  store.take("stats", { reasons: ["policy mine is in slot prefill of a/b, which decides nothing: no worker of a/b has the role prefill"] });
  assert.equal(store.problems()[0].href, "#slot/prefill/a%2Fb");
  store.take("stats", {});
});

test("m6 shares are among workers of the same role and models", () => {
  // M6.3
  takeFleet([row("1", { legs: 176 }), row("2", { legs: 0, models: 2 }), row("3", { legs: 0, models: 3 })]);
  assert.deepEqual(store.notable(), [], "each is the only worker of its model");
  assert.equal(charts.spread("prefill").textContent, "no two eligible workers share its legs");
  takeFleet([row("1", { legs: 99 }), row("2", { legs: 1 }), row("3", { legs: 300, models: 2 })]);
  assert.deepEqual(store.notable().map(({ worker: { id }, text }) => [id, plain(text)]), [["1", "gets 99 % of all prefill legs of its models"]]);
  assert.deepEqual(store.store.workers.map(({ share }) => share), [1.98, 0.02, 1]);
  assert.match(charts.spread("prefill").textContent, /2 workers, highest share first/);
});

test("m6 what status says of the gateway comes first, and is no markup", () => {
  // M6.1
  takeFleet([row("1", { legs: 95 }), row("2", { legs: 5 }), row(LONG, { url: "http://10.0.0.3:8000/", out: "unhealthy", legs: 100 })]);
  const stats = (more) => store.take("stats", { requests_per_second: 4, errors_per_second: 4, ready: true, reasons: [], ...more });
  const told = () => store.problems().map(({ bad, href, title, text }) => [Boolean(bad), href, plain(title), plain(text)]);
  stats({ ready: false, reasons: ["the configuration, or a file that it names, changed and is not applied: gw.toml:5:1: unknown key `dirr`", `model ${HOSTILE} cannot be served; ranks in service: prefill 2 of 2, decode 0 of 2, aggregated 0 of 0`, `worker ${LONG}: no KV events of rank 0 from tcp://10.0.0.3:5557: connection refused`] });
  assert.deepEqual(told(), [
    [true, undefined, "The gateway is not ready", "no model can be served; /readyz answers 503"],
    [true, null, "The configuration, or a file that it names, changed and is not applied", "gw.toml:5:1: unknown key `dirr`"],
    [true, "#fleet", `Model ${HOSTILE} cannot be served`, "ranks in service: prefill 2 of 2, decode 0 of 2, aggregated 0 of 0"],
    [true, `#worker/${LONG}`, "10.0.0.3:8000: no KV events of rank 0 from tcp://10.0.0.3:5557", "connection refused"],
    [true, "#overview/failed", "100 % of the requests failed", "over the last minute"],
    [true, `#worker/${LONG}`, "10.0.0.3:8000 is unhealthy", ""],
    [false, "#worker/1", "Worker 1 gets 95 % of all prefill legs", "Worker 1 takes 95.0 % of the prefill legs; its even share is 50.0 %"],
  ]);
  stats({ errors_per_second: 2 / 60, requests_per_second: 2 / 60, reasons: ["model a cannot be served; x", "model b cannot be served; y", "the decision log /full/log cannot be written: No space left on device"] });
  assert.deepEqual(told().slice(0, 3).map(([, , ...told]) => told), [["2 models cannot be served", "a, b"], ["The decision log /full/log cannot be written", "No space left on device"], ["10.0.0.3:8000 is unhealthy", ""]]);
  assert.ok(!told().some(([, , title]) => title.includes("requests failed")), "two requests are few");
  store.take("stats", null);
});

test("m6 a failed attempt of a request is told with its worker and cause, and is no time of the gateway", () => {
  // M6.4
  takeFleet([row("1"), row("2"), row("7", { role: "decode" }), row("8", { role: "decode" })]);
  const ended = (run, more) => outcome({ ttft_ms: 2070, duration_ms: 2080, times_ms: { queued: null, prefill_sent: 1030, prefill_ended: 2010, answer_sent: 2012 }, run, ...more });
  const run = (sent_ms, ended_ms, failed = null, status = null) => ({ sent_ms, ended_ms, failed, status });
  const leg = (id, name, worker, attempt, run, more) => decision(id, { leg: name, attempt, choice: { worker, dp_rank: 0, cost: 1 }, outcome: ended(run, more) });
  const [again] = requests.group([
    leg("4", "decode", 8, 1, run(2012, 2080)), leg("3", "prefill", 2, 1, run(1030, 2010)),
    leg("2", "decode", 7, 0, run(1010, 1028, "status_5xx", 500), { retried: true }), leg("1", "prefill", 1, 0, run(3, 1009), { retried: true }),
  ]);
  const told = (request) => requests.phases(request).map(({ kind, from, to }) => `${kind} ${from}-${to}`);
  assert.deepEqual(told(again), ["gateway 0-3", "failed 3-1028", "gateway 1028-1030", "prefill 1030-2010", "transfer 2010-2070", "decode 2070-2080"]);
  assert.deepEqual(again.notes, ["decode on 7 failed: HTTP 500"]);
  const page = request.story(again).map((part) => part?.textContent ?? part).join("");
  assert.ok(plain(page).includes("The largest part, 1.03 s, was an attempt that failed: decode on 7 (HTTP 500)."), page);
  assert.ok(receipts.receiptCard(receipt({ outcome: ended(run(3, 4, "connect")) })).textContent.includes("failed: no connection"));
  // Only the decode leg ran again: the prefill was not lost.
  const [kept] = requests.group([
    leg("3", "decode", 8, 1, run(1500, 2080), { times_ms: { queued: 2, prefill_sent: 5, prefill_ended: 1000, answer_sent: 1500 } }),
    leg("2", "decode", 7, 0, run(1001, 1490, "timeout"), { retried: true }), leg("1", "prefill", 1, 0, run(5, 1000)),
  ]);
  assert.deepEqual(told({ ...kept, outcome: { ...kept.outcome, times_ms: { queued: 2, prefill_sent: 5, prefill_ended: 1000, answer_sent: 1500 } } }), ["gateway 0-3", "queue 3-5", "prefill 5-1000", "transfer 1000-1001", "failed 1001-1490", "transfer 1490-2070", "decode 2070-2080"]);
  assert.deepEqual(kept.notes.slice(0, 1), ["decode on 7 failed: no answer in time"]);
});

test("m6 a stream whose engine broke is told by the legs that began it", () => {
  const at = (sent_ms, ended_ms, failed = null) => ({ sent_ms, ended_ms, failed, status: null });
  const leg = (id, attempt, run, more) => decision(id, { leg: "aggregated", attempt, outcome: outcome({ ttft_ms: 100, duration_ms: 5000, times_ms: { ...NO_TIMES, answer_sent: 3010 }, run, ...more }) });
  const [one] = requests.group([leg("2", 1, at(3010, 5000)), leg("1", 0, at(4, 3000, "broken"), { retried: true, stream_failed: { result: "continued" } })]);
  // M6.4
  assert.deepEqual(requests.phases(one).map(({ kind, from, to }) => `${kind} ${from}-${to}`), ["gateway 0-4", "prefill 4-100", "decode 100-5000"]);
  assert.deepEqual(one.notes, ["2 attempts"]);
});

test("a bar is for a share of a limit, and is empty at 0", () => {
  takeFleet([row("1", { limit: null }), row("2", { in_flight: 0 }), row("3", { out: "not_ready" }), row("4", { in_flight: 8 })]);
  const bars = store.store.workers.map((worker) => overview.workerRow(worker).querySelectorAll("i").map((bar) => bar.style.width));
  assert.deepEqual(bars, [[], ["0%"], [], ["50%"]]);
});

test("decisions of a slot are those of active and canary in the last whole minute, or since the policy is new", () => {
  const counted = [lane("active", { decisions: 900, decisions_by_minute: [300, 480, 120] }), lane("canary", { decisions: 90, decisions_by_minute: [0, 120, 5] }), lane("shadow", { decisions: 900, decisions_by_minute: [9, 9, 9] })];
  assert.equal(overview.decisionsText({ since_ms: Date.now() - 200e3 }, counted), "600/min");
  assert.match(overview.decisionsText({ since_ms: Date.now() - 100e3 }, counted), /^990 since \d\d:\d\d$/);
});

test("what an operator rolled back is no failure", () => {
  const bad = [["refused", "not_wasm"], ["rolled_back", "command"], ["rolled_back", "deadline"], ["withdrawn", "command"], ["installed", "changed"]].map(([result, reason]) => store.isBad({ result, reason }));
  assert.deepEqual(bad, [true, false, true, false, false]);
});

test("a refusal is open while it is in force", () => {
  const refused = { slot: "prefill", model: null, lane: "active", file: "prefill.wasm", digest: "d", kind: "not_wasm", message: HOSTILE, at_ms: 100, in_force: true };
  const status = { slot: "prefill", model: null, refusals: [refused] };
  store.take("slots", { slots: [status], strays: [], compiling: [], history: [{ ...refused, result: "refused", reason: "not_wasm", policy: null, generation: 1 }] });
  assert.equal(store.openRefusals(status).length, 1);
  assert.equal(store.openRefusals({ ...status, refusals: [{ ...refused, in_force: false }] }).length, 0);
});

const times = (p50) => ({ count: 200, p50, p90: p50 * 2, p99: p50 * 3, cdf: [[p50, 0.5], [p50 * 2, 1]] });
const lane = (name, more) => ({
  lane: name, policy: "kv-aware", native: null, generation: 1, decisions: 0, failed: 0, fallbacks: 0, sheds: 0, agreement: null, predicted_hit_rate: null,
  ttft_ms: null, itl_ms: null, e2e_ms: null, decisions_by_minute: [0, 0, 0], calls: 0, call_p99_us: null, call_p99_us_max: 250_000, ...more,
});

test("active, canary and shadow are compared side by side", () => {
  store.take("hello", { may_change: true });
  const trial = { policy: "new", generation: 2, share: 0.05, since_ms: Date.now() - 150e3, agree: 3, disagree: 1, failed: 0, shed: 0 };
  const status = { slot: "prefill", model: null, policy: "kv-aware", generation: 1, since_ms: 0, can_roll_back: true, canary: trial, shadow: { ...trial, generation: 5, share: 1 } };
  const table = (canaries) => lanes.lanesTable(status, [
    lane("active", { decisions: 1000, failed: 10, predicted_hit_rate: 0.5, ttft_ms: times(40), itl_ms: times(8), decisions_by_minute: [900, 60, 30], calls: 9, call_p99_us: 64 }),
    lane("canary", { decisions: canaries, generation: 2, ttft_ms: times(20), itl_ms: times(8.73), decisions_by_minute: [0, 5, 5], sheds: 3, calls: 4 }),
    lane("shadow", { decisions: 1000, generation: 5, agreement: 0.75, predicted_hit_rate: 0.1, fallbacks: 20 }),
  ]);
  const cellsOf = (shown) => Object.fromEntries(shown.querySelectorAll("tr").map((one) => { const [name, ...rest] = one.children.map((cell) => cell.textContent); return [name, rest]; }));
  const shown = table(100), cells = cellsOf(shown), heads = shown.querySelectorAll("th").map((one) => one.textContent);
  assert.match(heads[1], /1,000 decisions in 60 min95 % of sessions/);
  assert.match(heads[2], /100 decisions since \d\d:\d\d5 % of sessions set, 10 % of decisions/);
  assert.match(heads[3], /1,000 decisions compared since \d\d:\d\dasked for 100 % of decisions/);
  assert.deepEqual(cells["TTFT p90"], ["80 ms", "40 ms−50 %", "–"]);
  assert.equal(cellsOf(table(99))["TTFT p90"][1], "40 ms", "few decisions");
  assert.deepEqual(cells.success, ["99.00 %", "100 %+1", "–"]);
  assert.deepEqual(cells["ITL p50"], ["8.0 ms", "8.7 ms", "–"], "one step of the histogram");
  assert.deepEqual(cells["predicted hits"], ["50 %", "–", "10 %−40"]);
  assert.deepEqual(cells.agreement, ["–", "–", "75 %"]);
  // T8.1
  assert.match(cells.fallbacks[2], /^2.00 %/);
  assert.deepEqual(cells["call p99"], ["under 64 µs", "over 250 ms", "–"]);
  const swapped = lanes.lanesTable({ ...status, policy: "newer", generation: 6, canary: null, shadow: null }, [lane("active", { decisions: 9 })]);
  // M6.12
  assert.match(swapped.querySelectorAll("th")[1].textContent, /^activekv-aware @19 decisions before it ended$/);
  assert.deepEqual(shown.querySelectorAll("button").map((one) => one.textContent).filter((text) => text.endsWith("…")), ["Roll back …", "Promote …", "End …", "Promote …", "End …"]);
  store.take("hello", { may_change: false });
  const readOnly = lanes.lanesTable(status, [lane("active", {})]);
  assert.ok(!readOnly.querySelectorAll("button").some((one) => one.textContent.endsWith("…")), "who may not change sees no command");
});

test("distributions are lines from the fastest to the slowest request", () => {
  const plot = charts.distribution([{ lane: "active", points: [[40, 0.5], [80, 1]] }], "label", format.millis);
  const [line] = plot.querySelectorAll("path").filter((one) => one.attributes.class === "lane active");
  assert.equal(line.attributes.d.split("L").length, 3);
});

test("a command says what will change and is sent with the token after a confirmation", async () => {
  takeFleet([row("7"), row("8")]);
  for (const [draining, word, method] of [[false, "Drain", "POST"], [true, "Undrain", "DELETE"]]) {
    sent.length = 0;
    dialogs.askDrain({ ...store.store.byId.get("7"), draining });
    const box = document.getElementById("ask");
    assert.ok(box.open && sent.length === 0, "it asks first");
    assert.match(box.textContent, draining ? /Send requests to worker 7 again/ : /eligible prefill workers21/);
    const yes = box.querySelectorAll("button").find((one) => one.textContent === word);
    await yes.onclick();
    assert.deepEqual(sent, [[method, "workers/7/drain", "Bearer s3cret"]]);
  }
  sent.length = 0;
  const trial = { policy: HOSTILE, generation: 2, share: 0.05 };
  dialogs.askPromote({ slot: "prefill", model: "a b", policy: "kv-aware", generation: 1, canary: trial, shadow: null }, "canary");
  const box = document.getElementById("ask");
  assert.ok(box.textContent.includes(`${HOSTILE} @2 becomes the active policy`) && box.querySelectorAll("img").length === 0);
  await box.querySelectorAll("button").find((one) => one.textContent === "Promote").onclick();
  assert.equal(sent[0][1], "policies/prefill/promote?from=canary&model=a%20b");
  dialogs.askRollBack({ slot: "prefill", model: null, policy: "mine", generation: 2, previous: "kv-aware" });
  for (const part of ["kv-aware serves again", "pointsman policy rollback prefill --undo", "Only the gateway at gateway-2:9090 changes"]) assert.ok(box.textContent.includes(part), part);
});

test("why legs come to a worker is told by who decided and what was cached", () => {
  const found = worker.causes([
    decision("1", { leg: "prefill", outcome: outcome() }), decision("2", { leg: "prefill", outcome: outcome({ cached_tokens: { predicted: 0, reported: 0 } }) }),
    decision("3", { decider: { by: "session" } }), decision("5", { leg: "prefill", choice: { worker: 7, dp_rank: 0, cost: null }, outcome: outcome() }), decision("4", { decider: { by: "fallback", reason: "deadline" } }),
  ], "prefill");
  assert.deepEqual(found, { cached: 1, policy: 1, untold: 1, bound: 1, fallback: 1 });
  const silent = outcome({ cached_tokens: { predicted: null, reported: 80 } });
  store.take("slots", { ...store.store.slots, slots: [{ slot: "decode", model: null, generation: 1, canary: null }] });
  const told = [decision("1", { outcome: silent }), decision("2", { leg: "prefill", policy: "random", outcome: silent }), decision("3", { leg: "prefill", outcome: outcome() })];
  assert.deepEqual([requests.predictedText(0, told).textContent, requests.predictedText(0.5, told).textContent, requests.predictedText(null, told.slice(0, 1))], ["random predicts none", "50 % predicted, not by all", "none predicted"]);
  const before = [decision("4", { generation: 0 }), decision("5", { decider: { by: "session" } })].map((one) => ({ ...one, leg: "prefill", outcome: silent }));
  // M6.12
  assert.equal(requests.predictedText(0, before), "none predicted", "neither a policy that was replaced nor one that was not asked");
  assert.deepEqual(requests.hits([{ outcome: outcome() }, { outcome: null }]), { reported: 0.5, predicted: 0.6 });
  const known = [outcome(), silent, outcome({ cached_tokens: { predicted: 48, reported: null } })];
  // M4.12
  assert.deepEqual(requests.hits(known.map((one) => ({ outcome: one }))), { reported: 0.5, predicted: 0.45 }, "each of the prompts of which it is known");
  assert.equal(requests.hits([{ outcome: null }]), null);
});

/** A worker and its last hour, as `/workers/{id}` tells them. */
const described = () => ({
  worker: { id: 7, spec: { url: "http://10.0.0.7:8000", role: "decode", engine: "vllm" }, models: ["tiny"], health: "healthy", draining: false, ranks: [{ dp_rank: 0, active_requests: 1, active_prefill_tokens: 0, decode_blocks: 4, ttft_ewma_us: 645_000, itl_ewma_us: 23_000, error_ppm: 0 }], engine_load: null },
  hour: { legs: [5, 6, 7], in_flight: [1, 1, 1], kv_usage: [0.1, null, 0.2], ttft_ms: [640, 650, 645], itl_ms: [21, 22, 24], error_ppm: [0, 0, 0] },
});

test("m6 the page of a worker outlives a read that failed, and only an unknown worker ends it", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  takeFleet([row("7", { role: "decode" }), row("8", { role: "decode" })]);
  store.take("hour", { minutes: [1, 2, 3].map((minute) => ({ at_ms: Date.now() - 60e3 * (4 - minute) })) });
  let path = ok(described());
  answers = async (asked) => (asked.startsWith("workers/") ? path : ok({ decisions: [] }));
  const root = new Element("div"), view = worker.worker(root, ["7"]);
  await settle();
  assert.match(root.textContent, /^Fleet \/ decode.*Worker 7 eligible, healthy/);
  // A decode worker's tile has the line of its own figure.
  assert.ok(root.textContent.includes("Time per token23ms") && root.querySelectorAll("span").some(({ dataset }) => plain(dataset.most ?? "") === "max 24 ms"), root.textContent);
  path = status(503);
  t.mock.timers.tick(4000);
  await settle();
  // M6.5
  assert.match(root.textContent, /^The gateway cannot be read: the gateway answered 503\. What is shown is as of \d\d:\d\d:\d\d\.Fleet \/ decode/);
  path = ok(described());
  view.again();
  await settle();
  // M6.5
  assert.match(root.textContent, /^Fleet \/ decode/);
  path = status(404);
  t.mock.timers.tick(4000);
  await settle();
  // M6.5
  assert.match(root.textContent, /Worker 7 cannot be shown/);
  sent.length = 0;
  t.mock.timers.tick(60_000);
  assert.deepEqual(sent, [], "it is gone");
  path = ok(described());
  view.again();
  await settle();
  assert.match(root.textContent, /^Fleet \/ decode/, "another gateway knows it");
  view.close();
});

test("m6 a request in flight is read again after a read that failed", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  let failing = true;
  const one = { ...receipt({ candidates: [[7, 0]], left: null, costs: null, choice: { row: 0, worker: 7, dp_rank: 0, cost: null }, runner_up: null, shadow: null }), outcome: null };
  answers = async (path) => (failing ? status(503) : ok(path.startsWith("decisions?") ? { decisions: [one] } : one));
  const root = new Element("div"), view = request.request(root, ["1"]);
  await settle();
  assert.match(root.textContent, /cannot be shown: the gateway answered 503/);
  failing = false;
  t.mock.timers.tick(2000);
  await settle();
  // M6.5
  assert.match(root.textContent, /The request is in flight/);
  failing = true;
  t.mock.timers.tick(2000);
  await settle();
  // M6.5
  assert.match(root.textContent, /The request is in flight/);
  view.close();
});

test("m6 the overview says nothing of workers before they are known, and holds a row that is pointed at", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  answers = async () => status(503);
  store.store.known.delete("fleet");
  takeFleet([]);
  store.store.known.delete("fleet");
  store.take("stats", { queue: {}, ready: false, reasons: [] });
  store.take("slots", { slots: [], history: [], strays: [], compiling: [] });
  const root = new Element("div"), view = overview.overview(root, []);
  view.update(new Set(["stats", "slots"]));
  // M6.6
  assert.ok(root.textContent.includes("Workersloading") && !root.textContent.includes("no worker is registered"), root.textContent);
  takeFleet([row("7", { legs: 300 }), row("8", { legs: 100 })]);
  view.update(new Set(["fleet"]));
  const workers = root.querySelectorAll("div").find((part) => part.className === "part" && part.querySelector(".workers"));
  const hrefs = () => workers.querySelectorAll("a").map(({ attributes }) => attributes.href).filter((href) => href?.startsWith("#worker/"));
  const [first] = workers.querySelector("tbody").children;
  // M6.6
  assert.deepEqual(hrefs(), ["#worker/7", "#worker/8"]);
  const show = (legs) => {
    takeFleet([row("7", { legs }), row("8", { legs: 100 })]);
    t.mock.timers.tick(5000);
    view.update(new Set(["fleet"]));
  };
  workers.isPointed = true;
  show(20);
  // M6.8
  assert.deepEqual(hrefs(), ["#worker/7", "#worker/8"]);
  assert.match(first.textContent, /^7 prefill/);
  workers.isPointed = false;
  show(20);
  // M6.8: an element is not reused for another worker.
  assert.deepEqual([hrefs(), first.querySelector("a").attributes.href], [["#worker/8", "#worker/7"], "#worker/7"]);
  view.close();
  store.take("stats", null);
  store.store.known.delete("stats");
});

test("m6 the fleet holds the order of cells that are pointed at, and says when no worker is there", () => {
  const root = new Element("div"), view = fleet.fleet(root, []);
  const show = (workers) => {
    takeFleet(workers);
    view.update();
  };
  show([]);
  assert.ok(root.textContent.includes("no worker is registered") && !root.textContent.includes("nothing stands out"), root.textContent);
  const many = (hot) => Array.from({ length: 60 }, (_, place) => row(`${place}`, { legs: place === hot ? 90 : 30 }));
  show(many(5));
  const cells = () => root.querySelectorAll(".cells").flatMap((grid) => grid.children.map(({ dataset }) => dataset.id));
  root.querySelectorAll("button").find((one) => one.textContent === "highest first").onclick();
  assert.equal(cells()[0], "5");
  const blocks = root.querySelector(".blocks");
  blocks.isPointed = true;
  show(many(8));
  // M6.8
  assert.equal(cells()[0], "5");
  blocks.isPointed = false;
  show(many(8));
  // M6.8
  assert.equal(cells()[0], "8");
  const spoken = root.querySelectorAll("p").find(({ attributes }) => attributes.role === "status");
  // M6.8: figures that change are not read aloud.
  assert.deepEqual([spoken.textContent, root.querySelector(".about").attributes.role], ["", undefined]);
});

test("m6 a share of few legs is no alarm anywhere, and a worker that is out has none", () => {
  const few = [row("1", { legs: 7 }), ...Array.from({ length: 399 }, (_, place) => row(`${place + 2}`, { legs: place % 10 ? 0 : 1 }))];
  takeFleet(few);
  const [hot] = store.store.workers, shown = (one) => overview.workerRow(one).querySelectorAll("td")[2];
  // M6.7
  assert.deepEqual([hot.share > 6, store.heat(hot), shown(hot).textContent, shown(hot).className], [true, 0, "–", "n"]);
  // M6.7
  assert.equal(charts.spread("prefill").textContent, "47 legs in the last five minutes: too few to compare");
  takeFleet([row("1", { legs: 24 }), ...Array.from({ length: 19 }, (_, place) => row(`${place + 2}`, { legs: 1 }))]);
  const [high] = store.store.workers;
  // M6.7
  assert.deepEqual([store.heat(high), shown(high).textContent, shown(high).className], [0, "11×", "n"]);
  assert.deepEqual(charts.spread("prefill").querySelectorAll("rect").map((bar) => bar.attributes.class).filter(Boolean), []);
  takeFleet([row("1", { legs: 40 }), row("2", { legs: 0 })]);
  const [all] = store.store.workers, recorded = [];
  // M6.7: one session on one of two workers.
  assert.deepEqual([store.notable()[0].worker.id, worker.judgement(all, recorded).textContent.includes("look whether others could take its legs")], ["1", true]);
  const answers = [["chose", true], ["chose", false], ["refused", false], ["nobody_left", false], ["failed", false]];
  const asked = answers.map(([answer, agrees], place) => decision(`${place}`, { shadow: { generation: 2, answer, agrees, choice: null } }));
  // T8.2
  assert.ok(worker.judgement(all, asked).textContent.includes("The shadow would have sent 20 % of these legs elsewhere; it would have refused 40 %, and it failed in 20 %."), worker.judgement(all, asked).textContent);
  takeFleet([row("1", { legs: 40, out: "paused", reason: "its engine refused a request: too many requests (429)" }), row("2", { legs: 40 })]);
  const [paused] = store.store.workers;
  // M6.7
  assert.deepEqual([paused.hasShare, worker.shareText(paused), shown(paused).textContent], [false, "it gets no request now", "–"]);
  assert.ok(overview.workerRow(paused, store.notable()[0]).textContent.endsWith("paused: its engine refused a request: too many requests (429)"));
  const run = (failed, code) => ({ outcome: { run: { failed, status: code } } });
  // M6.7
  assert.equal(worker.errorText({ failed: 1, legs: 28 }, [run("overloaded", 503), run("status_5xx", 500), run(null, null), { outcome: null }]), "1 of 28 legs in five minutes; the engine refused 1 of the latest 3");
  assert.equal(worker.errorText({ failed: 0, legs: 0 }, []), "no leg in five minutes");
});

test("m6 long addresses lose what they have in common, and sentences have the same names", () => {
  const id = (place) => `${place}`.repeat(19), pod = (role, place) => `http://vllm-${role}-${place}.vllm-${role}.inference.svc.cluster.local:8000`;
  const named = (urls) => {
    takeFleet(urls.map(([url, role = "prefill"], place) => row(id(place + 1), { url, role })));
    return urls.map((_, place) => store.nameOf(id(place + 1)));
  };
  // M6.9
  assert.deepEqual(named([[pod("prefill", 0)], [pod("prefill", 1)], [pod("decode", 0), "decode"], [pod("decode", 1), "decode"]]), ["vllm-prefill-0", "vllm-prefill-1", "vllm-decode-0", "vllm-decode-1"]);
  const first = receipt({ candidates: [[0, 0], [1, 0]], candidates_text: [[id(1), 0], [id(2), 0]], left: null, costs: null, runner_up: null, shadow: null, stages: [], choice: { row: 0 }, sentences: ["", `Worker ${pod("prefill", 0).slice(7)} was chosen. The decision took 82015 µs.`, ""] });
  // M6.9
  assert.ok(receipts.receiptCard(first).textContent.includes("Worker vllm-prefill-0 was chosen. The decision took 82 ms."));
  // M6.9: pods of one name in two namespaces.
  assert.deepEqual(named([["http://worker-0.prefill.svc.cluster.local:80"], ["http://worker-0.decode.svc.cluster.local:80", "decode"]]), ["worker-0.prefill", "worker-0.decode"]);
  assert.deepEqual(named([["http://10.0.0.1:8000"], ["http://10.0.0.2:8000"]]), ["10.0.0.1:8000", "10.0.0.2:8000"]);
  assert.deepEqual(named([[pod("prefill", 0)]]), ["vllm-prefill….local:8000"], "a single one");
  assert.deepEqual(named([["http://a-very-long-name-of-an-engine-1.example.com"], ["http://a-very-long-name-of-an-engine-2.example.com"]]), ["a-very-long-…an-engine-1", "a-very-long-…an-engine-2"]);
  assert.equal(new Set(named([["http://same.example.org/the/same/path/of/all"], ["http://same.example.org/the/same/path/of/all"]])).size, 2, "equal ones have ids");
});

test("m6 an area ends where a line does, and a change before the first point keeps its number", () => {
  const now = 600_000, at = [60_000, 120_000, 180_000, 240_000, 300_000, 360_000];
  const d = (values) => charts.spark({ at, lines: [values], now, label: "x" }).querySelector("svg").children.filter((one) => one.attributes.class === "area").map((one) => one.attributes.d.split("Z").length - 1);
  // M6.10
  assert.deepEqual([d([1, 2, null, null, 3, 4]), d([1, 2, 3, 4, 5, 6]), d([null, 1, null, 2, null, 3])], [[2], [1], [0]]);
  const change = (at_ms) => ({ slot: "prefill", lane: "active", result: "installed", reason: "start", policy: "kv-aware", generation: 1, at_ms });
  store.take("slots", { slots: [], strays: [], compiling: [], history: [change(5e6 - 400e3), change(5e6 - 330e3), change(5e6 - 60e3)] });
  // M6.10
  assert.deepEqual(store.chartMarks(5e6, 300e3).filter(({ at_ms }) => at_ms >= 5e6 - 300e3).map(({ label }) => label), ["1–2", "3"]);
});

test("the text of a bar fits a phone: in the bar, before it or after it", () => {
  const place = (from, to, text) => request.placeOf({ from, to }, 100, text);
  assert.deepEqual([place(0, 20, "46 ms"), place(0, 4, "46 ms"), place(95, 100, "46 ms")], ["inside", "after", "before"]);
  assert.deepEqual([place(60, 100, "176 ms, 11 more tokens"), place(50, 100, "176 ms, 11 more tokens")], ["before", "inside"], "what it held at 390 pixels");
});

test("facts that are times have a unit", () => {
  const [stage] = receipt().stages, workers = { ...stage.workers, "prefill-us-per-ktoken": [92_657_048, 1000], "taint-preference": [0, 0], "active-prefill-tokens": [0, 0], "decode-blocks": [0, 0], "active-requests": [0, 0] };
  const text = receipts.receiptCard(receipt({ stages: [{ ...stage, workers }] })).textContent;
  assert.ok(text.includes("prefill of 1,000 tokens") && text.includes("92.7 s"), text);
});

test("the digests of a lane's filters stand before the one of the policy that ranks", () => {
  const part = (world, digest) => ({ world, policy: world, version: "1", digest });
  // T1.2
  assert.equal(slot.digests({ digest: "9e9a0011223344", parts: [part("filter", "aabbccddeeff00"), part("scorer", "9e9a0011223344"), part("scorer", "77")] }), "aabbccdd+9e9a0011");
  assert.equal(slot.digests({ digest: null, parts: [] }), "");
});

test("the state of a slot's policies shows how full it is", () => {
  assert.equal(slot.usage({ entries: 90, entries_limit: 100, bytes: 1024, bytes_limit: 4096 }).textContent, "90 keys, 90 % full");
});

test("events are taken in blocks, and ids of 64 bits stay exact", () => {
  const found = [];
  api.handleBlock(":", () => assert.fail("a comment is no event"));
  api.handleBlock('event: stats\ndata: {"a":1}', (kind, data) => found.push(kind, data));
  assert.deepEqual(found, ["stats", { a: 1 }]);
});

test("no file of the page turns text into markup or loads anything from elsewhere", () => {
  assert.equal(typeof fleet.fleet, "function");
  for (const name of readdirSync(FOLDER)) {
    const text = readFileSync(new URL(name, FOLDER), "utf8");
    for (const never of ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "setHTML", "eval(", "new Function", "https://"]) assert.ok(!text.includes(never), `${name}: ${never}`);
  }
});
