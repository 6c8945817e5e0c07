// Requests, put together from the decisions of their legs, and their rows.
import { apart, chip, make, setAttribute, setText, table } from "./dom.js";
import { clock, millis, number, percent } from "./format.js";
import { called, idOf, nameOf, rankName, sameSlot, store } from "./store.js";
import { explained, tip } from "./tips.js";

const LEGS = ["prefill", "decode", "aggregated"];
/** A wait in the queue from this on is worth knowing, milliseconds. */
const LONG_WAIT = 50;

/**
 * Puts decisions, newest first, together to requests. A client may use one id for several requests: a first attempt
 * at a leg that the request has already begins another one.
 */
export function group(decisions) {
  const open = new Map();
  const requests = [];
  for (const one of [...decisions].reverse()) {
    const part = one.plan ? "plan" : one.refused ? "refused" : one.leg;
    let request = open.get(one.request_id);
    if (!request || (one.attempt === 0 && request.parts.has(part)) || (request.ended !== undefined && one.outcome && request.ended !== one.outcome.ended_at_ms)) {
      request = { request_id: one.request_id, model: one.model, at_ms: one.at_ms, decisions: [], parts: new Set() };
      open.set(one.request_id, request);
      requests.push(request);
    }
    request.parts.add(part);
    request.decisions.push(one);
    if (one.outcome) request.ended = one.outcome.ended_at_ms;
  }
  return requests.reverse().map(describe);
}

/** Returns what a row shows of a request. */
function describe({ request_id, model, at_ms, decisions }) {
  const last = (test) => decisions.findLast(test) ?? null;
  const legs = Object.fromEntries(LEGS.map((leg) => [leg, last((one) => one.leg === leg && one.choice && !one.plan)]));
  const outcome = last((one) => one.outcome && !one.outcome.retried)?.outcome ?? last((one) => one.outcome)?.outcome ?? null;
  const refused = last((one) => one.refused)?.refused ?? null;
  const shed = decisions.some((one) => one.plan?.word === "shed");
  const runs = runsOf(decisions), attempts = failedAttempts(runs, outcome);
  return {
    id: decisions[0].id, request_id, model, at_ms, outcome, ids: decisions.map((one) => one.id),
    workers: LEGS.filter((leg) => legs[leg]).map((leg) => ({ leg, id: idOf(legs[leg].choice), rank: legs[leg].choice.dp_rank })),
    state: stateOf(outcome, refused, shed), notes: notesOf(decisions, outcome, attempts), runs, attempts, canary: decisions.some((one) => one.mode === "canary"),
    words: [...new Set(decisions.flatMap((one) => [one.slot, one.policy ?? "native", one.decider.by, one.decider.reason, one.reason]))].filter(Boolean).join(" "),
  };
}

/** Kind and text of an outcome. A request that was refused has ended, whether or not an outcome is recorded. */
function stateOf(outcome, refused, shed) {
  if (!outcome && refused) return ["refused", refused.code];
  if (!outcome && shed) return ["refused", "shed"];
  if (!outcome) return ["open", "in flight"];
  const { status, code } = outcome;
  if (status < 400) return ["ok", "ok"];
  return [status >= 500 ? "failed" : "refused", `${status} ${code.replaceAll("_", " ")}`];
}

/** What ended a leg without an answer, in words. */
export function causeOf({ failed, status }) {
  if (status) return `HTTP ${status}`;
  return { connect: "no connection", closed: "the connection broke", broken: "the connection broke", timeout: "no answer in time", down: "the engine was down" }[failed] ?? failed.replaceAll("_", " ");
}

/** The legs of a request that were sent, in the order of time: milliseconds since its first byte. */
function runsOf(decisions) {
  const sent = decisions.filter((one) => one.outcome?.run && one.choice);
  const run = ({ leg, choice, outcome: { run, retried, duration_ms: end } }) => ({
    leg, id: idOf(choice), rank: choice.dp_rank, retried, from: run.sent_ms, to: run.ended_ms ?? end, why: run.failed ? causeOf(run) : null,
  });
  return sent.map(run).sort((a, b) => a.from - b.from);
}

/**
 * The attempts of a request that failed before another one served it: a leg that failed, and what the same attempt ran
 * before and beside it. An attempt that sent tokens to the client served it, although it broke later.
 */
function failedAttempts(runs, outcome) {
  const found = [];
  for (const { leg, id, rank, from, to, why } of runs.filter(({ retried }) => retried)) {
    const last = found.at(-1);
    if (!last || (last.why && from >= last.to)) {
      found.push({ from, to, leg, id, rank, why });
      continue;
    }
    last.to = Math.max(last.to, to);
    if (why && !last.why) Object.assign(last, { leg, id, rank, why });
  }
  const first = outcome?.ttft_ms ?? Infinity;
  return found.filter(({ why, to }) => why && to <= first);
}

function notesOf(decisions, outcome, attempts) {
  const notes = [];
  const most = Math.max(...decisions.map(({ attempt }) => attempt));
  if (attempts.length) notes.push(attempts.map(({ id, leg, why }) => `${leg} on ${nameOf(id)} failed: ${why}`).join(", "));
  else if (most > 0) notes.push(`${most + 1} attempts`);
  const fallback = decisions.find((one) => one.decider.by === "fallback");
  if (fallback) notes.push(`${fallback.leg}: fallback, ${fallback.decider.reason.replaceAll("_", " ")}`);
  const waited = outcome?.times_ms?.queued;
  if (waited >= LONG_WAIT) notes.push(`waited ${millis(waited)} in the queue`);
  if (decisions.some((one) => one.plan?.word === "local")) notes.push("prefilled on the decode worker");
  const other = decisions.find((one) => one.shadow?.agrees === false && one.shadow.choice && !one.plan);
  if (other) {
    const [worker, rank] = other.shadow.choice_text ?? other.shadow.choice;
    notes.push(`shadow would have chosen ${rankName(worker, Number(rank))}`);
  }
  const refused = decisions.find((one) => one.refused?.detail);
  if (refused) notes.push(refused.refused.detail);
  const bound = decisions.find((one) => ["pin", "session"].includes(one.decider.by));
  if (bound && notes.length < 2) notes.push(`${bound.leg} by ${bound.decider.by}`);
  if (outcome?.status === 499) notes.push("the client left");
  return notes;
}

/** Requests without a decision, in the form of the others. */
export const unrouted = (list) => list.map(({ request_id, model, outcome }) => ({
  id: null, request_id, model, at_ms: outcome.ended_at_ms - outcome.duration_ms, outcome, ids: [], workers: [],
  state: stateOf(outcome), notes: [], runs: [], attempts: [], canary: false, words: "",
}));

/** The times of the legs that sent the first token. Those that the gateway tells are of the last legs, which may have sent the rest of a stream. */
function servingTimes({ times_ms: times, ttft_ms: first }, runs) {
  const answer = runs.findLast(({ leg, from, to }) => leg !== "prefill" && from <= first && to >= first);
  if (first === null || !answer || (times.prefill_sent ?? times.answer_sent) <= first) return times;
  const prefill = answer.leg === "decode" ? runs.findLast(({ leg, from }) => leg === "prefill" && from <= first) : null;
  return { ...times, prefill_sent: prefill?.from ?? null, prefill_ended: prefill?.to ?? null, answer_sent: answer.from };
}

/** Puts failed attempts in the place of what the gateway did meanwhile, and of the wait for a transfer. */
function withFailed(list, attempts) {
  const isIdle = ({ kind }) => kind === "gateway" || kind === "transfer";
  const without = (parts, { from, to }) => parts.flatMap((one) => [{ ...one, to: Math.min(one.to, from) }, { ...one, from: Math.max(one.from, to) }].filter((part) => part.to > part.from));
  const failed = attempts.flatMap((attempt) => list.filter((one) => !isIdle(one)).reduce(without, [{ kind: "failed", from: attempt.from, to: attempt.to, attempt }]));
  const kept = attempts.reduce((parts, attempt) => [...parts.filter((one) => !isIdle(one)), ...without(parts.filter(isIdle), attempt)], list);
  return [...kept, ...failed].sort((a, b) => a.from - b.from);
}

/** The phases of a request: `{ kind, from, to }` in milliseconds since its first byte; of a failed attempt also `attempt`. */
export function phases({ outcome, runs = [], attempts = [] }) {
  if (!outcome?.times_ms) return [];
  const { ttft_ms: first, duration_ms: end } = outcome, { queued, prefill_sent: prefill, prefill_ended: filled, answer_sent: answer } = servingTimes(outcome, runs);
  return withFailed(phasesOf({ first, end, queued, prefill, filled, answer }, attempts[0]?.from ?? Infinity), attempts);
}

/** The phases of the attempt that served. The request was sent first at `sent`, if that was earlier. */
function phasesOf({ first, end, queued, prefill, filled, answer }, sent) {
  const began = prefill ?? answer, start = Math.min(began ?? end, sent);
  const found = [];
  const add = (kind, from, to) => to > from && found.push({ kind, from, to });
  const wait = Math.max(0, start - (queued ?? 0));
  if (began !== null) add("gateway", 0, wait);
  if (queued !== null) add("queue", wait, start);
  if (began === null) return found;
  add("gateway", start, began);
  if (prefill !== null) {
    add("prefill", prefill, filled ?? end);
    if (first !== null && filled !== null) add("transfer", filled, first);
    if (answer !== null) add("decode", first ?? Math.max(answer, filled ?? 0), end);
  } else if (first === null) {
    add("whole", answer, end);
  } else {
    add("prefill", answer, first);
    add("decode", first, end);
  }
  return found;
}

const PHASES = { gateway: "reading and routing", failed: "failed attempt", queue: "queue", prefill: "prefill", transfer: "transfer and first step", decode: "decode", whole: "prefill and decode" };

/** The colour of each phase. */
const COLOURS = { gateway: "--f2", failed: "--bad", queue: "--four", prefill: "--one", whole: "--one", transfer: "--two", decode: "--three" };

/** The phases as one line of legend. */
export const phaseLegend = () => make("span.legend", null, ["gateway", "queue", "failed", "prefill", "transfer", "decode"].map((kind) => make("span", null, make(`i.${kind}`), PHASES[kind])));

/** Shows the phases of a request as one bar: one property, because many rows change every second. */
function setStrip(node, request, scale) {
  const list = phases(request);
  const text = list.map(({ kind, from, to, attempt }) => `${PHASES[kind]} ${millis(to - from)}${attempt ? ` (${called(attempt.id)}: ${attempt.why})` : ""}`).join(", ");
  setAttribute(node, "aria-label", text || "nothing measured");
  setAttribute(node, "title", text);
  node.hidden = !list.length;
  const at = (ms) => `${Math.min(100, (100 * ms) / scale).toFixed(1)}%`;
  const stops = list.map(({ kind, from, to }) => `var(--sunk) 0 ${at(from)}, var(${COLOURS[kind]}) 0 ${at(to)}`);
  node.style.setProperty("background", `linear-gradient(90deg, ${[...stops, "var(--sunk) 0"].join(", ")})`);
}

/** Whether a request matches every word of a filter. */
export function matches(request, words) {
  if (!words.length) return true;
  const workers = request.workers.flatMap(({ id, leg }) => [id, nameOf(id), leg]);
  const text = [request.request_id, request.id, request.model, ...request.state, ...workers, ...request.notes, request.words, request.canary ? "canary" : ""].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

const HEADS = () => ["time", "outcome", tip("flow", "where the time went"), ["n", tip("rowTtft", "TTFT")], ["n", tip("rowItl", "ITL")], ["n", tip("tokens", "tokens")], ["n", tip("cached", "cached")], "workers", "worth knowing"];

/** A table of requests. `show(requests, empty)` puts others into its rows, which stay. */
export function requestTable() {
  const body = make("tbody"), none = make("td", { colspan: 9 });
  const node = apart(table("rows.requests", HEADS()));
  node.replaceChild(body, node.querySelector("tbody"));
  const empty = make("tr.none", null, none);
  const rows = [];
  node.show = (requests, text) => {
    const scale = Math.max(1, ...requests.map(({ outcome }) => outcome?.duration_ms ?? 0));
    while (rows.length < requests.length) rows.push(requestRow());
    const shown = body.children.length - (empty.parentNode === body ? 1 : 0);
    if (shown !== requests.length || !requests.length) body.replaceChildren(...(requests.length ? rows.slice(0, requests.length) : [empty]));
    setText(none, text);
    requests.forEach((request, place) => setRow(rows[place], request, scale));
  };
  return node;
}

function requestRow() {
  const cell = (kind, ...content) => make(`td.${kind}`, null, content);
  return make("tr", null, cell("when", make("a.hit")), cell("what", make("span.st")), cell("where", make("span.flow", { role: "img" })), cell("ttft.n"), cell("itl.n"), cell("tokens.n"),
    cell("cached.n", make("span"), make("span.dim")), cell("route"), cell("note", chip("canary", "canary"), make("span.dim")));
}

function setRow(row, request, scale) {
  const { id, at_ms: at, state: [kind, text], outcome, workers, notes, canary } = request;
  const [when, what, where, ttft, itl, tokens, cached, route, note] = row.children;
  row.className = id ? "go" : "";
  const [link] = when.children, [state] = what.children, [reported, predicted] = cached.children, [chipped, told] = note.children;
  setAttribute(link, "href", id ? `#request/${id}` : null);
  setText(link, clock(at));
  state.className = `st ${kind}`;
  setText(state, text);
  setStrip(where.children[0], request, scale);
  setText(ttft, millis(outcome?.ttft_ms));
  setText(itl, millis(outcome?.itl_ms));
  setText(tokens, outcome ? `${number(outcome.prompt_tokens)} → ${number(outcome.output_tokens)}` : "–");
  const hit = outcome?.cached_tokens ?? {};
  setText(reported, number(hit.reported));
  setText(predicted, typeof hit.reported === "number" && typeof hit.predicted === "number" && hit.reported !== hit.predicted ? ` (${number(hit.predicted)})` : "");
  setText(route, routeOf(workers));
  route.className = workers.length ? "route" : "route dim";
  chipped.hidden = !canary;
  setText(told, notes.slice(0, 2).join(" · "));
  note.className = canary || notes.length ? "note" : "note bare";
  setAttribute(note, "title", notes.join(" · "));
}

/** The workers of a request: prefill → decode. */
function routeOf(workers) {
  if (!workers.length) return "not routed";
  const names = workers.map(({ id, rank }) => rankName(id, rank));
  return workers.length === 1 && workers[0].leg !== "aggregated" ? `${workers[0].leg} ${names[0]}` : names.join(" → ");
}

/** The shares of prompt tokens that requests found cached: reported and predicted, each of the requests of which it is known. */
export function hits(requests) {
  const shareOf = (kind) => {
    const known = requests.map(({ outcome }) => outcome).filter((outcome) => outcome?.prompt_tokens && typeof outcome.cached_tokens?.[kind] === "number");
    const [found, prompts] = [(one) => one.cached_tokens[kind], (one) => one.prompt_tokens].map((of) => known.reduce((sum, one) => sum + of(one), 0));
    return prompts ? Math.min(1, found / prompts) : null;
  };
  const [reported, predicted] = [shareOf("reported"), shareOf("predicted")];
  return reported === null && predicted === null ? null : { reported, predicted };
}

/** Whether the policy that made a decision still decides in its slot. */
const isInForce = ({ slot, slot_model: model, generation }) =>
  store.slots.slots.some((one) => sameSlot(one, { slot, model }) && [one, one.canary].some((lane) => lane?.generation === generation));

/** The predicted share of prompt tokens. Policies in force that did not ask what is cached predicted nothing; the hover names them. */
export function predictedText(predicted, decisions) {
  const silent = decisions.filter((one) => one.leg !== "decode" && one.policy && one.decider.by === "policy" && one.outcome?.cached_tokens?.predicted === null && isInForce(one));
  const [first, ...others] = new Set(silent.map(({ policy }) => policy));
  const text = predicted ? `${percent(predicted)} predicted` : "none predicted";
  if (!first) return text;
  const some = predicted ? `${text}, not by all` : others.length ? `${others.length + 1} policies predict none` : `${first} predicts none`;
  return explained(`Nothing is predicted for requests decided by ${[first, ...others].join(" and ")}: a policy predicts only when it asks what is cached.`, some);
}

export const share = (part, whole) => (whole ? percent(part / whole) : "–");
