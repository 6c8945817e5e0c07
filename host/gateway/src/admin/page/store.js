// What the gateway told last, and what follows from it.
import { address, names, number, percent, plural, times } from "./format.js";

export const store = {
  hello: {}, slots: { slots: [], history: [], strays: [], stray_problems: [], more_strays: 0, compiling: [] }, stats: null, minutes: [],
  decisions: [], unrouted: [], recording: true, workers: [], byId: new Map(), names: new Map(), known: new Set(),
};

/** From this multiple of an even share on a worker is worth a look; from the second on it stands out. */
export const HOT = [3, 6];
/** Legs below which a high share means nothing. */
const MIN_LEGS = 40;
/** A share is not shown of a worker that got fewer legs than this and would get fewer if legs were spread evenly. */
const MIN_SHOWN = 10;
/** A worker with so many failed legs, which are this share of all its legs, is worth a look. */
const [MIN_FAILED, MANY_FAILED] = [3, 0.05];
/** With fewer failed requests in the last minute their share means nothing. */
const MIN_ERRORS = 3;

export const nameOf = (id) => store.names.get(String(id)) ?? String(id).slice(0, 10);
/** The name of a worker in a sentence. */
export function called(id, first) {
  const name = nameOf(id);
  return /^[\d…]+$/.test(name) ? `${first ? "Worker" : "worker"} ${name}` : name;
}
export const rankName = (worker, rank) => nameOf(worker) + (rank || (rank === 0 && store.byId.get(String(worker))?.ranks > 1) ? `/${rank}` : "");
export const idOf = (who) => String(who.worker_text ?? who.worker);
export const isOut = (worker) => worker.out !== null;

/** Takes an event. */
export function take(kind, data) {
  store.known.add(kind);
  if (kind === "hello") store.hello = data;
  if (kind === "slots") store.slots = data;
  if (kind === "stats") store.stats = data;
  if (kind === "hour") store.minutes = data.minutes;
  if (kind === "decisions") Object.assign(store, { decisions: data.decisions, unrouted: data.unrouted, recording: data.on });
  if (kind === "fleet") takeFleet(data);
}

function takeFleet({ columns, workers: rows }) {
  const workers = rows.map((row) => Object.fromEntries(columns.map((column, place) => [column, row[place]])));
  store.names = names(workers);
  for (const ofOneRole of groups(workers, ({ role }) => role)) {
    const busiest = ofOneRole.reduce((most, worker) => Math.max(most, worker.in_flight), 1);
    const peers = groups(ofOneRole, ({ models }) => models);
    for (const all of peers) {
      const eligible = all.filter((worker) => !isOut(worker));
      const [legs, ranks] = ["legs", "ranks"].map((column) => eligible.reduce((sum, worker) => sum + worker[column], 0));
      for (const worker of all) {
        // A worker that gets no legs now shares them with no other.
        worker.part = isOut(worker) ? null : legs ? worker.legs / legs : 0;
        worker.even = isOut(worker) ? null : ranks ? worker.ranks / ranks : 0;
        worker.share = worker.even ? worker.part / worker.even : 0;
        worker.hasShare = !isOut(worker) && Math.max(worker.legs, worker.even * legs) >= MIN_SHOWN;
        worker.peers = eligible.length;
        worker.pool = `${worker.role} legs${peers.length > 1 ? " of its models" : ""}`;
        worker.load = worker.in_flight / (worker.limit || busiest);
        worker.errors = worker.legs || worker.failed ? worker.failed / Math.max(worker.legs, worker.failed) : null;
      }
    }
  }
  store.workers = workers;
  store.byId = new Map(workers.map((worker) => [worker.id, worker]));
}

/** The lists of workers with the same key. */
function groups(workers, key) {
  const found = new Map();
  for (const worker of workers) {
    if (!found.has(key(worker))) found.set(key(worker), []);
    found.get(key(worker)).push(worker);
  }
  return [...found.values()];
}

/** Eligible workers of a role that share their legs with others, the highest share first. */
export const sharing = (role) => ofRole(role).filter((worker) => !isOut(worker) && worker.peers > 1).sort((a, b) => b.share - a.share);

export const ofRole = (role) => store.workers.filter((worker) => worker.role === role);
export const roles = () => ["prefill", "decode", "aggregated"].filter((role) => ofRole(role).length);

/** States of workers that were asked for; the others are failures. */
const ASKED = ["draining", "leaving", "paused"];
/** Whether a worker fails: what it said last is old. */
export const isDown = ({ out }) => out !== null && !ASKED.includes(out);

/** Why a worker gets no request. One that drains and has no request left was drained. */
export const outText = ({ out, reason, in_flight: left }) => (out !== "draining" ? out.replaceAll("_", " ") : left ? `draining, ${plural(left, "request")} left` : "drained");

/** What part of the legs a worker takes, and what would be even: by ranks. */
export function takes({ id, pool, ranks, part, even }, first) {
  const digits = even < 0.01 ? 2 : 1;
  return `${called(id, first)}${ranks > 1 ? ` (${ranks} ranks)` : ""} takes ${percent(part, digits)} of the ${pool}; its even share is ${percent(even, digits)}`;
}

/** How hot a worker's share is, from 0 to 2: of enough legs, so that it is no chance. */
export const heat = ({ legs, share }) => (legs < MIN_LEGS ? 0 : HOT.filter((bound) => share >= bound).length);

/** Whether many of a worker's legs failed. */
export const isFailing = ({ failed, errors }) => failed >= MIN_FAILED && errors >= MANY_FAILED;

/** Whether a worker gets far more than its share: many times the mean, or nearly everything of a small role. */
export const isSkewed = ({ out, legs, part, peers, share }) => out === null && peers > 1 && legs >= MIN_LEGS && (share >= HOT[0] || part >= 0.9);

/**
 * Why a worker is worth a look, the first of each kind: `text` has no subject, `title` is a sentence about all `more` + 1
 * workers of the kind, and `detail` is about the first.
 */
export function notable() {
  const found = [];
  const first = ([worker, ...others], kind, text, many, detail, one = text) => worker && found.push({
    worker, kind, text: text(worker), more: others.length, detail: detail(worker, others.length ? called(worker.id, true) : ""),
    title: others.length ? `${number(others.length + 1)} workers ${many}` : `${called(worker.id, true)} ${one(worker)}`,
  });
  const by = (value) => (a, b) => value(b) - value(a);
  const all = store.workers;
  first(all.filter(isSkewed).sort(by((worker) => worker.share)), "warn", ({ part, pool, share }) =>
    part >= 0.9 ? `gets ${percent(part)} of all ${pool}` : `gets ${times(share).slice(0, -1)} times its share`, "get far more than their share", (worker) => takes(worker, true));
  const fails = ({ failed, legs }) => `failed ${number(failed)} of its ${number(Math.max(legs, failed))} legs in five minutes`;
  first(all.filter((worker) => !isOut(worker) && isFailing(worker)).sort(by((worker) => worker.errors)), "bad", fails, "failed many of their legs", (worker, name) => name && `${name} ${fails(worker)}`);
  const out = all.filter(isOut);
  for (const state of new Set(out.map((worker) => worker.out))) {
    const why = state.replaceAll("_", " ");
    const text = (worker) => outText(worker) + (worker.reason ? `: ${worker.reason}` : "");
    first(out.filter((worker) => worker.out === state), ASKED.includes(state) ? "dim" : "bad", text, `are ${why}`, ({ reason }, name) => [name, reason].filter(Boolean).join(": "), () => `is ${why}`);
  }
  return found;
}

export const slotName = ({ slot, model }) => slot + (model ? ` of ${model}` : "");
export const slotHref = ({ slot, model }) => `#slot/${slot}${model ? `/${encodeURIComponent(model)}` : ""}`;
export const sameSlot = (a, b) => a.slot === b.slot && (a.model ?? null) === (b.model ?? null);

/** Refusals of a slot that are in force. */
export const openRefusals = (slot) => slot.refusals.filter((one) => one.in_force).reverse();

/** Marks of changes that are closer than this are one, as a share of the chart's span. */
const CLOSE = 1 / 8;

/** A chart begins with the first point. What changed up to so many milliseconds before is shown at its edge. */
const START = 120e3;

/** The changes as marks of a chart that shows `span` milliseconds: those whose numbers would touch are one. */
export function chartMarks(now, span) {
  const found = [], begin = now - span;
  for (const { at_ms, number, isBad } of marks(now)) {
    const at = at_ms < begin && at_ms >= begin - START ? begin : at_ms;
    const last = found.at(-1);
    if (last && at - last.at_ms < CLOSE * span) Object.assign(last, { to: number, isBad: last.isBad || isBad });
    else found.push({ at_ms: at, number, to: number, isBad });
  }
  return found.map((mark) => ({ ...mark, label: mark.to > mark.number ? `${mark.number}–${mark.to}` : `${mark.number}` }));
}

/** Whether a change is a failure. What an operator rolled back or ended is none. */
export const isBad = ({ result, reason }) => result === "refused" || (["rolled_back", "withdrawn"].includes(result) && reason !== "command");

/** Changes of the last hour, oldest first, numbered from 1. */
export function marks(now) {
  const shown = store.slots.history.filter(({ at_ms: at, result }) => at > now - 3600e3 && result !== "kept");
  return shown.map((change, place) => ({ ...change, number: place + 1, isBad: isBad(change) }));
}

/** What `/status` says of the gateway, as problems. A reason has its subject before the first colon or semicolon. */
function reasons({ ready = true, reasons: all = [] }) {
  const found = [];
  if (!ready) found.push({ bad: true, title: "The gateway is not ready", text: "no model can be served; /readyz answers 503" });
  const unserved = all.map((reason) => /^model (.*) cannot be served/s.exec(reason)?.[1]).filter(Boolean);
  if (unserved.length > 1) found.push({ bad: true, href: "#fleet", title: `${number(unserved.length)} models cannot be served`, text: unserved.join(", ") });
  for (const reason of all) {
    if (unserved.length > 1 && /^model .* cannot be served/s.test(reason)) continue;
    const worker = /\bworker (\d+)/.exec(reason)?.[1];
    const [, title, text = ""] = /^((?:worker \d+: )?.*?)(?:[:;] (.*))?$/s.exec(reason).map((part) => part?.replace(/\bworker (\d+)/g, (_, id) => called(id)));
    const [, slot, model] = /^policy .* is in slot ([a-z-]+)(?: of (.+))?, which decides nothing/s.exec(reason) ?? [];
    const href = store.byId.has(worker) ? `#worker/${worker}` : slot ? slotHref({ slot, model }) : reason.startsWith("model ") ? "#fleet" : null;
    found.push({ bad: !slot, href, title: title[0].toUpperCase() + title.slice(1), text });
  }
  return found;
}

/** Problems, most urgent first: `{ bad, href, title, text }`. */
export function problems() {
  const found = reasons(store.stats ?? {});
  const { errors_per_second: errors = 0, requests_per_second: rate = 0 } = store.stats ?? {};
  if (errors * 60 >= MIN_ERRORS - 0.5 && errors > rate * 0.01) found.push({ bad: true, href: "#overview/failed", title: `${percent(errors / rate, 1)} of the requests failed`, text: "over the last minute" });
  for (const slot of store.slots.slots) {
    const name = slotName(slot);
    if (slot.breaker_open) found.push({ bad: true, href: slotHref(slot), title: `Slot ${name} runs its fallback`, text: `${slot.policy} fails: ${slot.last_failure?.message ?? slot.last_failure?.kind ?? "see its failures"}` });
    const refused = openRefusals(slot);
    if (refused.length) found.push({ href: slotHref(slot), title: refused.length > 1 ? `${refused.length} policy files were refused` : "A policy file was refused", text: `${refused[0].file}: ${refused[0].message}` });
    if (slot.state === "rolled-back") found.push({ href: slotHref(slot), title: `Slot ${name} was rolled back`, text: `${slot.policy} serves again` });
    for (const only of [slot.only_choice, slot.canary?.only_choice].filter(Boolean)) {
      found.push({ href: `#worker/${idOf(only)}`, title: `Policy ${slot.policy} (slot ${name}) always chooses worker ${rankName(idOf(only), only.dp_rank)}`, text: `in its last ${number(only.decisions)} decisions` });
    }
  }
  const workers = notable().filter(({ kind }) => kind !== "dim");
  for (const { worker, kind, title, detail, more } of workers) found.push({ bad: kind === "bad", href: more ? "#fleet" : `#worker/${worker.id}`, title, text: detail });
  for (const file of store.slots.strays) found.push({ href: "#slot", title: "A policy file belongs to no slot", text: file });
  return found.sort((a, b) => Number(Boolean(b.bad)) - Number(Boolean(a.bad)));
}

export const whereOf = (worker) => [worker.role, worker.zone && `zone ${worker.zone}`].filter(Boolean).join(", ");
export const urlOf = (worker) => address(worker.url);
