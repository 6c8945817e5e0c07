// One decision: its sentences, its candidates with their facts, and what made up each cost.
import { apart, chip, button, dim, link, make, table } from "./dom.js";
import { micros, number, percent, plural } from "./format.js";
import { causeOf } from "./requests.js";
import { nameOf, rankName, slotHref, slotName, store, sameSlot, urlOf } from "./store.js";
import { tip } from "./tips.js";

/** Candidates that are shown before the others are asked for. */
const FIRST = 10;
/** Columns of facts. */
const MAX_FACTS = 5;
const PARTS = ["compute", "before", "heldBar", "active"];
const PART_NAMES = { compute: "to compute or transfer", before: "waiting before it", heldBar: "held", active: "requests" };
/** Default settings of predicted-latency. A receipt does not have the settings. */
const PREDICTED = { step: 1000, delayed: 0.25, shared: 0.03, context: 0.08, growth: 500, transfer: 0.2, output: 256 };
/** Policies whose costs are split, and the unit of the costs. */
const UNITS = { "kv-aware": "blocks", "predicted-latency": "prompt tokens" };

const whole = (value) => number(value);
/** Facts with a name and a format of their own, in the order of the columns. */
const FACTS = [
  ["cached-blocks-device", "cached blocks", whole, "hit"], ["cached-blocks-host", "in host memory", whole], ["cached-blocks-disk", "on disk", whole],
  ["active-prefill-tokens", "tokens waiting", whole, "waiting"], ["decode-blocks", "blocks held", whole, "held"], ["active-requests", "in flight", whole],
  ["engine-queue", "engine queue", whole], ["kv-usage", "KV in use", (value) => percent(Number(value)), "kv"],
  ["ttft-ewma-us", "TTFT there", micros, "workerTtft"], ["itl-ewma-us", "ITL there", micros, "workerItl"], ["error-ppm", "errors", (value) => percent(value / 1e6, 1), "errors"],
];

/** Returns the facts of each candidate, by row. */
function factsOf(receipt) {
  const facts = receipt.candidates.map(() => ({}));
  for (const stage of receipt.stages) {
    const rows = stage.kept ?? receipt.candidates.map((_, row) => row);
    for (const [name, values] of Object.entries(stage.workers ?? {})) {
      const exact = stage.workers[`${name}_text`] ?? values;
      if (Array.isArray(values)) exact.forEach((value, place) => { if (facts[rows[place]]) facts[rows[place]][name] = value; });
    }
  }
  return facts;
}

/** The parts of a cost by the formula of the policy; null when they do not add up to the cost. `all` has the facts of every candidate. */
export function costParts(receipt, facts, cost, all = [facts]) {
  const stage = receipt.stages.find(({ policy }) => policy in UNITS);
  if (!stage || cost === null || cost === undefined) return null;
  const of = (name) => Number(stage.request[name] ?? 0);
  const own = (name) => Number(facts[name] ?? 0);
  const cached = of("overlap-score-credit") * own("cached-blocks-device") + of("host-cache-credit") * own("cached-blocks-host") + of("disk-cache-credit") * own("cached-blocks-disk");
  const liked = Math.exp(-Math.tanh(own("taint-preference")));
  const [parts, factors] = stage.policy === "kv-aware" ? [kvParts(of, own, cached), [1]] : [predictedParts(of, own, cached, receipt.leg, length(stage)), [1, speed(receipt.leg, facts, all)]];
  const sum = PARTS.reduce((total, part) => total + parts[part], 0) * liked;
  // A decision that explores ignores the measured speed.
  const factor = factors.find((one) => Math.abs(one * sum - cost) <= 0.01 * Math.max(1, Math.abs(cost)));
  return factor === undefined ? null : Object.fromEntries(PARTS.map((part) => [part, parts[part] * liked * factor]));
}

function kvParts(of, own, cached) {
  const block = Math.max(1, of("block-size")), prompt = of("prompt-tokens") / block;
  const held = own("decode-blocks"), active = of("active-request-weight") * own("active-requests");
  if (!of("track-prefill-tokens")) return { compute: 0, before: 0, heldBar: of("overlap-score-credit") > 0 ? Math.max(0, held - cached) : held, active };
  const all = of("prefill-load-scale") * Math.max(0, own("active-prefill-tokens") / block + prompt - cached);
  const compute = Math.min(all, of("prefill-load-scale") * Math.max(0, prompt - cached));
  return { compute, before: all - compute, heldBar: held, active };
}

/** Mean length of an answer relative to the usual one, as predicted-latency learned it. */
const length = (stage) => Math.max(1, Number(stage.state?.answer ?? 0) / 1000 / PREDICTED.output);

function predictedParts(of, own, cached, leg, length) {
  const block = Math.max(1, of("block-size")), prompt = of("prompt-tokens"), requests = own("active-requests"), waiting = own("active-prefill-tokens");
  const growth = leg === "prefill" ? 0 : PREDICTED.growth, computes = of("track-prefill-tokens") > 0, scale = computes ? of("prefill-load-scale") : 0;
  const compute = Math.max(1, prompt - cached * block);
  const transfer = PREDICTED.transfer * Math.max(0, prompt - own("cached-blocks-device") * block);
  return {
    compute: computes ? scale * compute : transfer, before: scale * (waiting + (waiting > 0 ? PREDICTED.step : 0)),
    heldBar: length * PREDICTED.context * (own("decode-blocks") * block + growth * requests),
    active: scale * requests * (PREDICTED.delayed * compute + length * PREDICTED.shared * prompt) + of("active-request-weight") * block * requests,
  };
}

/** A candidate's measured time relative to the mean of those measured, as predicted-latency has it. */
function speed(leg, facts, all) {
  const relative = (name) => {
    const known = all.map((one) => Number(one[name] ?? 0)).filter((time) => time > 0), time = Number(facts[name] ?? 0);
    return time > 0 ? Math.min(4, Math.max(0.25, (time * known.length) / known.reduce((sum, one) => sum + one, 0))) : 1;
  };
  if (leg === "decode") return relative("itl-ewma-us");
  const [low, high] = [relative("prefill-us-per-ktoken"), relative(leg === "prefill" ? "ttft-ewma-us" : "itl-ewma-us")].sort((a, b) => a - b);
  return high < 1 ? high : Math.max(1, low);
}

/** The candidates as rows, the chosen one first and then by cost. */
export function candidates(receipt) {
  const facts = factsOf(receipt);
  const seen = receipt.left ? receipt.left.map((row) => facts[row]) : facts;
  const [other, otherRank] = receipt.shadow?.choice_text ?? receipt.shadow?.choice ?? [];
  const rows = receipt.candidates.map((candidate, row) => {
    const [worker, rank] = receipt.candidates_text?.[row] ?? candidate;
    const place = receipt.left ? receipt.left.indexOf(row) : row;
    const cost = place < 0 ? null : receipt.costs?.[place] ?? null;
    return {
      worker: String(worker), rank: Number(rank), cost, facts: facts[row], parts: costParts(receipt, facts[row], cost, seen), filtered: place < 0,
      chosen: receipt.choice?.row === row, second: receipt.runner_up?.row === row, shadow: other !== undefined && String(other) === String(worker) && Number(otherRank) === Number(rank),
    };
  });
  const order = (row) => (row.chosen ? -Infinity : row.filtered ? Infinity : row.cost ?? 1e30);
  return rows.sort((a, b) => order(a) - order(b));
}

/** The end of the name of a fact that is a time in microseconds. */
const MICROS = /-us(-per-ktoken)?$/;

/** Which facts the candidates' table shows: those of which something is known. */
function shownFacts(rows) {
  const some = (name) => rows.some(({ facts }) => facts[name] !== undefined && Number(facts[name]) !== 0);
  const known = FACTS.filter(([name]) => some(name));
  const named = new Set(FACTS.map(([name]) => name));
  const others = [...new Set(rows.flatMap(({ facts }) => Object.keys(facts)))]
    .filter((name) => !named.has(name) && some(name) && !/-known$|^worker-id|^dp-rank|^load-age|^local-prefill|^total-blocks/.test(name))
    .map((name) => (MICROS.test(name) ? [name, `${name.replace(MICROS, "").replaceAll("-", " ")}${name.endsWith("-per-ktoken") ? " of 1,000 tokens" : ""}`, micros] : [name, name.replaceAll("-", " "), (value) => (typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 2) : String(value))]));
  return [...known, ...others].slice(0, MAX_FACTS);
}

function costBar({ cost, parts }, top, low) {
  const bar = make("div.bar", { "aria-hidden": "true" });
  if (parts) {
    for (const part of PARTS) if (parts[part] > 0) bar.append(make(`i.${part}`, { title: `${PART_NAMES[part]} ${number(parts[part], 1)}`, style: { width: `${(100 * parts[part]) / top}%` } }));
  } else if (cost !== null) {
    bar.append(make("i.plain", { style: { width: `${(100 * (cost - low)) / (top - low || 1)}%` } }));
  }
  return make("div.cost", null, bar, make("b", null, number(cost, Math.abs(cost) < 10 ? 2 : 1)));
}

/** The candidates as a line, when nothing is recorded of them. */
const candidateLine = (rows) => make("p.quiet", null, `${plural(rows.length, "candidate")}: `, rows.slice(0, FIRST).map((one, place) => [
  place > 0 && ", ", link(`#worker/${one.worker}`, `${nameOf(one.worker)}/${one.rank}`), one.chosen && " (chosen)", one.shadow && !one.chosen && " (shadow’s choice)", one.filtered && " (filtered out)"]),
  rows.length > FIRST && ` and ${number(rows.length - FIRST)} more`);

function candidateTable(receipt, rows, decode) {
  const costs = rows.map(({ cost }) => cost).filter((cost) => cost !== null);
  const [low, top] = [Math.min(0, ...costs), Math.max(1e-9, ...costs)];
  const facts = shownFacts(rows);
  const node = apart(make("div"));
  const row = (one) => make(`tr${one.chosen ? ".pick" : ""}`, null,
    make("td.name", null, link(`#worker/${one.worker}`, make("b", null, `${nameOf(one.worker)}/${one.rank}`)), one.chosen && chip("active", "chosen"), one.second && chip("plain", "runner-up"),
      one.shadow && chip("shadow", "shadow’s choice"), one.filtered && chip("plain", "filtered out")),
    costs.length > 0 && make("td.bars", null, costBar(one, top, low)),
    facts.map(([name, label, format]) => make("td.n", { "data-label": label }, one.facts[name] === undefined ? "–" : format(one.facts[name]))));
  const show = (count) => {
    const heads = ["worker/rank", ...(costs.length ? [tip("cost", "cost")] : []), ...facts.map(([, label, , key]) => ["n", key ? tip(key, label) : label])];
    const more = rows.length - count;
    node.replaceChildren(table("rows.candidates", heads, rows.slice(0, count).map(row)), more > 0 ? make("p.quiet", null, button("sub", `show all ${number(rows.length)} candidates`, () => show(rows.length))) : "");
  };
  show(Math.min(FIRST, rows.length));
  return node;
}

const TITLES = { prefill: "Prefill leg", decode: "Decode leg", aggregated: "Answer by one worker" };

/** The sentences of a receipt, with the names of workers and the form of times that the page has elsewhere. */
function said({ sentences = [], candidates: all, candidates_text: texts }) {
  const workers = [...new Set(all.map(([worker], row) => String(texts?.[row]?.[0] ?? worker)))].map((id) => store.byId.get(id)).filter(Boolean);
  const long = workers.filter((worker) => nameOf(worker.id) !== urlOf(worker)).sort((a, b) => urlOf(b).length - urlOf(a).length);
  const named = long.reduce((text, worker) => text.replaceAll(urlOf(worker), () => nameOf(worker.id)), sentences.slice(1, -1).join(" "));
  return named.replace(/\b(\d+) µs/g, (_, time) => micros(Number(time))).replace(/(\d) (?=[mµ]s\b)/g, "$1\u00a0");
}

/** The card of a receipt. */
export function receiptCard(receipt) {
  const slot = { slot: receipt.slot, model: receipt.slot_model ?? null };
  const status = store.slots.slots.find((one) => sameSlot(one, slot));
  const title = receipt.plan ? "Plan" : `${TITLES[receipt.leg]}${receipt.attempt ? `, attempt ${receipt.attempt + 1}` : ""}`;
  const rows = candidates(receipt);
  const parts = rows.some((row) => row.parts);
  const used = PARTS.filter((part) => rows.some((row) => row.parts?.[part] > 0));
  return make("section.card.flush", { "data-decision": receipt.id },
    make("div.head", null, make("h2", null, title), chip(receipt.mode, receipt.mode), receipt.outcome?.run?.failed && chip("no", `failed: ${causeOf(receipt.outcome.run)}`), dim(link(slotHref(slot), `slot ${slotName(slot)}`), ` · ${receipt.policy ?? "native"} @${receipt.generation}`)),
    make("p.say", null, said(receipt)),
    parts && make("p.legend", null, used.map((part) => make("span", null, make(`i.${part}`), tip(part, PART_NAMES[part]))), make("span", null, `in ${UNITS[receipt.stages.find(({ policy }) => policy in UNITS).policy]}`)),
    rows.length > 0 && !receipt.plan && [receipt.costs?.length || shownFacts(rows).length ? candidateTable(receipt, rows) : candidateLine(rows), receipt.costs?.length ? null : make("p.quiet", null, "No costs are recorded: POST /v1/route with the same body asks for an explanation, and tells those that the policy has.")],
    others(receipt, status, slot));
}

/** What the trials of the slot would have chosen. */
function others(receipt, status, slot) {
  const lines = [];
  const line = (kind, label, ...text) => lines.push(chip(kind, label), make("p", null, ...text));
  const { shadow } = receipt;
  if (shadow) {
    const [worker, rank] = shadow.choice_text ?? shadow.choice ?? [];
    const policy = status?.shadow?.generation === shadow.generation ? `${status.shadow.policy} ` : "It ";
    const asked = status?.shadow ? status.shadow.agree + status.shadow.disagree + status.shadow.failed + status.shadow.shed : 0;
    const rate = asked ? link(slotHref(slot), `it agrees in ${percent(status.shadow.agree / asked)} of its decisions`) : "";
    const cost = dearer(receipt, worker, rank);
    const said = (text) => line("shadow", `shadow @${shadow.generation}`, `${policy}${text}`);
    const none = { refused: `would have refused it with ${shadow.status}.`, nobody_left: "would have refused it: its filters dropped every candidate.", failed: `failed (${shadow.kind}).`, abstained: "abstained." };
    if (none[shadow.answer]) said(none[shadow.answer]);
    else if (shadow.plan) said(`would have answered ${shadow.plan}, ${shadow.agrees ? "the same" : "another plan"}.`);
    else if (worker === undefined) said("would have chosen no worker.");
    else if (shadow.agrees) said("would have chosen the same worker.");
    else line("shadow", `shadow @${shadow.generation}`, `${policy}would have chosen `, make("b", null, rankName(worker, Number(rank))), cost, ". Whether that would have been faster is not known", rate ? "; " : "", rate, ".");
  }
  if (status?.canary && receipt.mode === "active") line("canary", `canary @${status.canary.generation}`, "was not asked: this request is in the active lane.");
  return lines.length ? make("div.others", null, lines) : null;
}

function dearer(receipt, worker, rank) {
  const row = receipt.candidates.findIndex(([one, other]) => String(one) === String(worker) && Number(other) === Number(rank));
  const place = receipt.left ? receipt.left.indexOf(row) : row;
  const cost = receipt.costs?.[place];
  if (row < 0 || cost === undefined || receipt.choice?.cost === undefined || receipt.choice.cost === null) return "";
  const more = cost - receipt.choice.cost;
  return `: ${Math.abs(more) < 0.005 ? "equal" : `${number(more, 2)} dearer`} by the costs of the active policy`;
}

/** A receipt as text: one line for each list of numbers, so that a matrix of facts reads by rows. */
export const receiptText = (receipt) => JSON.stringify(receipt, null, 2).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, inner) => `[${inner.replace(/\s+/g, " ")}]`);
