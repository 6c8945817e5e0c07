// The overview: what needs attention, the signals of the last hour, slots, workers and the newest requests.
import { get } from "./api.js";
import { crossHair, meter, spanOf, spark, spread } from "./charts.js";
import { card, chip, choice, dim, isPointed, link, make, put, render, table } from "./dom.js";
import { clock, micros, millis, minute, number, percent, timeParts, times } from "./format.js";
import { group, matches, phaseLegend, predictedText, requestTable, unrouted } from "./requests.js";
import { chartMarks, isDown, isFailing, isOut, isSkewed, marks, nameOf, notable, outText, problems, roles, sameSlot, sharing, slotHref, slotName, store, takes } from "./store.js";
import { tip } from "./tips.js";

const MAX_ROWS = 20;
const MAX_PROBLEMS = 6;
const MAX_WORKERS = 8;
const MAX_CHANGES = 6;
/** How often requests of a filter and the summary of slots are read, milliseconds. */
const AGAIN = 4000;
/** Requests in flight that are shown before those that ended. */
const MAX_OPEN = 5;
/** Requests that ended: with fewer among the newest decisions, more are read. */
const FEW = 12;
/** How often signals, workers and requests are drawn, milliseconds. */
const [SIGNALS, WORKERS, REQUESTS] = [4900, 4900, 1900];
const FILTERS = { all: "ended=true", failed: "failed=true", slow: "min_ttft_ms=1000", canary: "lane=canary" };

export function overview(root, [filter]) {
  const parts = Object.fromEntries(["problems", "signals", "slots", "changes", "workers", "spread"].map((name) => [name, make("div.part")]));
  const requests = requestsCard(filter in FILTERS ? filter : "all");
  // `undefined` until the summary was read for the first time.
  let summary, closed = false, timer = 0, newest_ms, rows = [];
  const drawn = {};
  /** Whether a part was drawn longer ago than this: drawing anew leaves garbage. */
  const due = (part, interval) => {
    if (Date.now() - (drawn[part] ?? 0) < interval) return false;
    drawn[part] = Date.now();
    return true;
  };
  const readSummary = async () => {
    try {
      summary = await get("decisions/summary?window=5m");
    } catch {
      summary ??= null;
    }
    if (closed) return;
    if (!document.hidden) showSlots();
    timer = setTimeout(readSummary, AGAIN);
  };
  const showSlots = () => {
    if (summary === undefined || !store.known.has("slots")) return;
    render(parts.slots, [summary, store.slots.slots.map(shapeOf), store.slots.compiling], () => slotsCard(summary));
  };
  for (const name of ["signals", "slots", "workers"]) put(parts[name], loading(name));
  put(root, make("h1.hidden-title", null, "Overview"), parts.problems, parts.signals, make("div.cols", null, parts.slots, parts.changes), make("div.cols", null, parts.workers, parts.spread), requests.node);
  crossHair(parts.signals);
  readSummary();
  return {
    kinds: ["slots", "stats", "hour", "fleet", "decisions"],
    update(changed) {
      const later = [];
      const any = (...kinds) => kinds.some((kind) => changed.has(kind));
      const change = store.slots.history.at(-1)?.at_ms;
      // The badges of the charts are those of the list of changes.
      if (change !== newest_ms) Object.assign(drawn, { signals: 0, workers: 0 });
      newest_ms = change;
      if (any("stats", "hour", "slots")) {
        if (due("signals", SIGNALS)) put(parts.signals, signals());
        else later.push("stats");
      }
      if (any("slots")) {
        showSlots();
        render(parts.changes, [store.slots.history, minute(Date.now())], changesCard);
      }
      if (any("fleet", "stats", "slots") && store.known.has("fleet")) {
        if (due("workers", WORKERS)) {
          render(parts.problems, problems(), problemList);
          // A row that is pointed at stays in its place.
          rows = workersShown(isPointed(parts.workers) ? rows : []);
          put(parts.workers, workersCard(rows));
          put(parts.spread, spreadCard());
        } else {
          later.push("fleet");
        }
      }
      if (any("decisions")) {
        if (due("requests", REQUESTS)) requests.update();
        else later.push("decisions");
      }
      return later;
    },
    close() {
      closed = true;
      clearTimeout(timer);
      requests.close();
    },
  };
}

/** Stands for a part until the gateway has told what it shows. */
const loading = (name) => card("", name[0].toUpperCase() + name.slice(1), null, make("p.dim", null, "loading"));

/** What the slots’ rows show of a slot, apart from the summary. */
const shapeOf = ({ slot, model, policy, generation, breaker_open: open, canary, shadow, refusals }) =>
  [slot, model, policy, generation, open, canary?.generation, shadow?.generation, refusals.length];

function problemList() {
  const found = problems();
  if (!found.length) return null;
  const shown = found.slice(0, MAX_PROBLEMS);
  const others = found.length - shown.length;
  return make("ul.problems", { "aria-label": "Needs attention" }, shown.map(({ bad, href, title, text }) => make(`li${bad ? ".bad" : ""}`, null, href ? link(href, make("b", null, title)) : make("b", null, title), make("span.more", { title: text }, text))),
    others > 0 && make("li.others", null, `and ${number(others)} more; pointsman status lists what is wrong with the gateway`));
}

/** A figure with its line. `figures` are `[value, unit, name]`; `note` stands below the line, in place of its highest value. */
export function signal(key, label, figures, below, chart, ends, note) {
  const figure = ([value, unit, name], place) => make("b", null, value, make("span", null, unit), name && make("small", null, make(`i.key${place}`), name));
  return make("section.card.signal", null, make("h2", null, tip(key, label)), make("div.figures", null, figures.map(figure)), make("p.below", null, below), chart,
    make("div.axis", null, make("span", null, ends[0]), make("span.now", { "data-most": note ?? chart.most }), make("span", null, ends[1])));
}

const rate = (value) => number(value, value < 100 ? 1 : 0);

function signals() {
  const { stats, minutes } = store;
  if (!stats) return loading("signals");
  const now = Date.now(), at = [...minutes.map((one) => one.at_ms), now];
  const of = (key) => [...minutes, stats].map((one) => (one[key] === undefined ? null : one[key]));
  const shares = [...minutes, stats].map(({ requests_per_second: rate, errors_per_second: errors }) => (rate ? 1 - errors / rate : null));
  const span = spanOf(at, now), numbered = chartMarks(now, span), ends = [minute(now - span), minute(now)];
  const line = (label, lines, format, more) => spark({ at, lines, now, marks: numbered, label: `${label} in the last hour`, format, ...more });
  const latency = (name) => ["p50", "p90", "p99"].map((quantile) => [...timeParts(stats[`${name}_${quantile}_ms`]), quantile]);
  const success = shares.at(-1), lowest = Math.min(1, ...shares.filter((one) => one !== null));
  const floor = Math.max(0, Math.min(0.99, lowest - (1 - lowest) * 0.2));
  const waiting = [...minutes.map((one) => one.waiting), stats.queue.waiting];
  return make("div.signals", null,
    signal("requests", "Requests", [[rate(stats.requests_per_second), "/s"]], [tip("goodput", "goodput"), ` ${rate(stats.goodput_per_second)}/s, ${number(stats.inflight)} in flight`], line("Requests per second", [of("requests_per_second")], (value) => `${number(value, 1)}/s`), ends),
    signal("success", "Success", [success === null ? ["–", ""] : percent(success, 2).split(/\s/)], `${number(stats.errors_per_second, 1)}/s failed, ${number(stats.refusals_per_second, 1)}/s refused`, line("Success", [shares], (value) => percent(value, 2), { low: floor, top: 1.0005 }), ends, shares.some((one) => one !== null) ? `floor ${percent(floor, 1)}` : ""),
    signal("ttft", "Time to first token", latency("ttft"), null, line("Time to first token", ["p50", "p90", "p99"].map((one) => of(`ttft_${one}_ms`)), millis), ends),
    signal("itl", "Time per token", latency("itl"), null, line("Time per token", ["p50", "p90", "p99"].map((one) => of(`itl_${one}_ms`)), millis), ends),
    signal("cache", "Cache hits", [percent(stats.cached_share).split(/\s/)], predictedText(stats.predicted_share, store.decisions), line("Cache hits", [of("cached_share")], percent, { top: 1 }), ends),
    signal("queue", "Queue", [[number(stats.queue.waiting), "waiting"]], [tip("output", "output"), ` ${number(stats.output_tokens_per_second)} tokens/s`], line("Requests in the queue", [waiting], number, { top: Math.max(4, ...waiting) * 1.1 }), ends));
}

export function slotsCard(summary) {
  const rows = [], idle = [];
  for (const slot of store.slots.slots) {
    const all = summary?.slots.find((one) => sameSlot(one, slot))?.lanes ?? [];
    const lanes = all.filter((one) => one.generation === (one.lane === "active" ? slot : slot[one.lane])?.generation);
    // A summary read before a swap has decisions of the previous generation: the slot is used all the same.
    const used = slot.canary || slot.shadow || slot.refusals.length || all.some((lane) => lane.decisions) || store.slots.compiling.some((one) => one.slot === slot.slot && one.model === slot.model);
    if (used) rows.push(slotRow(slot, lanes));
    else idle.push(slot);
  }
  const content = [];
  if (rows.length) content.push(table("rows.slots", ["slot", "active policy", tip("trials", "trials"), ["n", tip("rate", "decisions")], ["n", tip("fallback", "fallbacks")], ["n", tip("call", "call p99")]], rows));
  if (idle.length) {
    const policies = new Set(idle.map(({ policy }) => policy));
    content.push(make("p.quiet", null, rows.length ? "Idle: " : "No slot decided in the last five minutes: ", idle.map((slot, place) => [place ? ", " : "", link(slotHref(slot), slotName(slot))]), policies.size === 1 ? `, ${idle.length > 1 ? "all " : ""}with ${idle[0].policy}` : ""));
  }
  return make("section.card.flush", null, make("div.head", null, make("h2", null, "Slots"), dim("which policy chooses the worker of each leg")), content);
}

/** Decisions of active and canary: of the last whole minute, or of all the time while the active policy is newer. */
export function decisionsText({ since_ms: since }, lanes) {
  const deciding = lanes.filter(({ lane }) => lane !== "shadow"), sum = (count) => number(deciding.reduce((total, lane) => total + count(lane), 0));
  return Date.now() - since < 120e3 ? `${sum((lane) => lane.decisions)} since ${minute(since)}` : `${sum((lane) => lane.decisions_by_minute.at(-2) ?? 0)}/min`;
}

function slotRow(slot, lanes) {
  const active = lanes.find(({ lane }) => lane === "active");
  const trials = [];
  if (slot.canary) trials.push(chip("canary", `canary ${slot.canary.policy} @${slot.canary.generation} · ${percent(slot.canary.share)}`));
  if (slot.shadow) {
    const { agree, disagree, failed, shed } = slot.shadow, asked = agree + disagree + failed + shed;
    trials.push(chip("shadow", `shadow ${slot.shadow.policy} @${slot.shadow.generation}${asked ? ` · agrees ${percent(agree / asked)}${shed ? `, would refuse ${percent(shed / asked)}` : ""}` : ""}`));
  }
  for (const one of store.slots.compiling.filter((file) => file.slot === slot.slot && file.model === slot.model)) trials.push(chip("wait", `${one.file} compiles`));
  return make("tr.go", null, make("td", null, make("a.hit", { href: slotHref(slot) }, slotName(slot))), make("td.policy", null, slot.policy, dim(` @${slot.generation}`), slot.breaker_open && [" ", chip("no", "fallback serves")]),
    make("td.trials", { "data-label": "trials" }, trials.length ? trials.map((one) => [one, " "]) : dim("none")), make("td.n", { "data-label": "decisions" }, active ? decisionsText(slot, lanes) : "–"),
    make("td.n", { "data-label": "fallbacks" }, active?.decisions ? percent(active.fallbacks / active.decisions, 1) : "0 %"), make("td.n", { "data-label": "call p99" }, callText(active)));
}

/** The time of 99 of 100 calls, which is known up to a bound. */
export const callText = (lane) => (lane?.call_p99_us ? `under ${micros(lane.call_p99_us).replace(".0", "")}` : lane?.calls ? make("span.st.refused", null, `over ${micros(lane.call_p99_us_max).replace(".0", "")}`) : "–");

const VERBS = { installed: "installed", promoted: "promoted", refused: "file refused", removed: "file removed", rolled_back: "rolled back", withdrawn: "ended" };

/** What a change says, as text. */
export function changeText({ result, reason, policy, generation }) {
  const verb = VERBS[result] ?? result.replaceAll("_", " ");
  if (result === "refused") return `${verb}: ${reason.replaceAll("_", " ")}`;
  const now = policy ? `${policy}${generation === null ? "" : ` @${generation}`}` : "";
  const by = reason === "command" && result !== "promoted" ? " by an operator" : "";
  return verb + by + (now && (result === "rolled_back" ? `, ${now} serves again` : ` ${now}`));
}

function changesCard() {
  const numbered = marks(Date.now()).reverse();
  const lines = numbered.slice(0, MAX_CHANGES).map((change) => make("li", null, make(`i.dot${change.isBad ? ".bad" : ""}`, null, change.number), make("time", null, minute(change.at_ms)),
    make("span", null, link(slotHref(change), make("b", null, `${slotName(change)}${change.lane === "active" ? "" : ` ${change.lane}`}`)), `: ${changeText(change)}`)));
  const last = store.slots.history.at(-1);
  const none = last ? `none in the last hour; the last one was at ${clock(last.at_ms)}` : "none since the gateway started";
  return make("section.card", null, make("div.head", null, make("h2", null, tip("changes", "Changes")), numbered.length > 0 && dim("numbered in the charts")), lines.length ? make("ol.log", null, lines) : make("p.dim", null, none));
}

/** Ids of the workers that are shown: those of `before`, or the ones worth a look and then the busiest. */
function workersShown(before) {
  const held = before.filter((id) => store.byId.has(id));
  if (held.length) return held;
  const found = new Set(notable().map(({ worker }) => worker.id));
  const busiest = store.workers.filter(({ id }) => !found.has(id)).sort((a, b) => b.share - a.share || b.load - a.load || a.id.localeCompare(b.id));
  return [...found, ...busiest.map(({ id }) => id)].slice(0, MAX_WORKERS);
}

function workersCard(ids) {
  const all = store.workers, out = all.filter(isOut).length, found = new Map(notable().map((one) => [one.worker.id, one]));
  const shown = ids.map((id) => store.byId.get(id));
  const text = `${number(all.length - out)} of ${number(all.length)} eligible${shown.length < all.length ? "; those worth a look, then the busiest" : ""}`;
  const body = shown.map((worker) => workerRow(worker, found.get(worker.id)));
  return make("section.card.flush", null, make("div.head", null, make("h2", null, "Workers"), dim(text), make("a.end", { href: "#fleet" }, `all ${number(all.length)}`)),
    all.length ? workerTable(body) : make("p.quiet", null, "no worker is registered"));
}

export const workerTable = (body) => table("rows.workers", ["worker", ["n", tip("load", "load")], ["n", tip("share", "share of legs")], ["n", tip("kv", "KV in use")], ["n", tip("errors", "errors")], "state"], body);

export function workerRow(worker, why) {
  const text = why ? why.text + (why.more ? `; ${number(why.more)} more` : "") : isOut(worker) ? outText(worker) : "eligible";
  const kind = why?.kind ?? (isDown(worker) ? "bad" : "dim");
  return make("tr.go", { "data-key": worker.id }, make("td.name", null, make("a.hit", { href: `#worker/${worker.id}` }, nameOf(worker.id)), dim(` ${worker.role}${worker.zone ? `, zone ${worker.zone}` : ""}`)),
    make("td.n", { "data-label": "load" }, worker.limit ? `${worker.in_flight} of ${worker.limit}` : number(worker.in_flight), worker.limit && !isDown(worker) && meter(worker.load)),
    make(`td.n${isSkewed(worker) ? ".warn" : ""}`, { "data-label": "share" }, worker.hasShare ? times(worker.share) : "–"),
    make("td.n", { "data-label": "KV" }, isDown(worker) ? "–" : percent(worker.kv)), make(`td.n${isFailing(worker) ? ".bad" : ""}`, { "data-label": "errors" }, percent(worker.errors, 1)),
    make(`td.why.${kind}`, null, text));
}

function spreadCard() {
  const most = roles().map((role) => sharing(role)[0]).filter(Boolean).sort((a, b) => b.share - a.share)[0];
  if (!most) return make("section.card", null, make("div.head", null, make("h2", null, tip("spread", "Spread of legs"))), make("p.dim", null, "no two eligible workers share a role and its models"));
  return make("section.card", null, make("div.head", null, make("h2", null, tip("spread", `Spread of ${most.role} legs`))), spread(most.role), most.hasShare && make("p.mt", null, `${takes(most, true)}.`));
}

/** The newest requests: some in flight, those that ended, and those without a decision. */
function newest(more) {
  const known = new Map();
  for (const one of [...group(store.decisions), ...more]) {
    const key = `${one.request_id} ${one.at_ms}`;
    if (!known.get(key)?.outcome) known.set(key, one);
  }
  const all = [...known.values(), ...unrouted(store.unrouted)].sort((a, b) => b.at_ms - a.at_ms);
  const open = all.filter(({ state: [kind] }) => kind === "open"), ended = all.filter(({ state: [kind] }) => kind !== "open");
  return [...open.slice(0, MAX_OPEN), ...ended].sort((a, b) => b.at_ms - a.at_ms);
}

/** The newest requests, or those of a filter, which the gateway looks up in all that it keeps. */
function requestsCard(chosen) {
  const rows = requestTable(), held = dim("");
  const input = make("input.end", { type: "search", placeholder: "id, model, worker, code …", "aria-label": "Filter requests" });
  const node = make("section.card.flush", null, make("div.head", null, make("h2", null, "Requests"), choice("Which requests", Object.keys(FILTERS).map((name) => [name, name]), chosen, choose), phaseLegend(), held, input), rows);
  let filter = chosen, found = [], timer = 0, closed = false;
  const words = () => input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const show = () => {
    const list = filter === "all" ? newest(found) : found;
    const kept = list.filter((one) => matches(one, words())).slice(0, MAX_ROWS);
    const none = !store.recording ? "decisions are not recorded: [decisions] keep = 0" : words().length ? "no request matches the filter" : filter === "all" ? "no request yet" : `no ${filter} request among those that the gateway keeps`;
    rows.show(kept, none);
  };
  const load = async () => {
    clearTimeout(timer);
    const mine = filter;
    try {
      // A busy gateway's newest decisions are all of requests in flight.
      if (mine === "all" && group(store.decisions).filter((one) => one.outcome).length >= FEW) {
        found = [];
        return;
      }
      const answer = await get(`decisions?short=true&limit=100&${FILTERS[mine]}`);
      if (mine !== filter) return;
      found = group(answer.decisions);
      if (mine === "failed") found = [...found, ...unrouted(store.unrouted)].sort((a, b) => b.at_ms - a.at_ms);
      if (mine !== "all") show();
    } catch { /* read again soon */
    } finally {
      if (!closed && mine === filter) timer = setTimeout(load, AGAIN);
    }
  };
  function choose(name) {
    filter = name;
    found = [];
    show();
    load();
  }
  input.addEventListener("input", show);
  load();
  return {
    node,
    update() {
      if (filter !== "all") return;
      const pointed = rows.matches(":hover") || rows.contains(document.activeElement);
      held.textContent = pointed ? "held while you look" : "";
      if (!pointed || !rows.querySelector("tr.go")) show();
    },
    close() {
      closed = true;
      clearTimeout(timer);
    },
  };
}
