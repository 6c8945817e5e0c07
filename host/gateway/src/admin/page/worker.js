// One worker: its figures over the last hour, why legs come to it, its ranks and its latest requests.
import { get } from "./api.js";
import { crossHair, meter, spanOf, spark } from "./charts.js";
import { askDrain } from "./dialogs.js";
import { button, card, dim, isPointed, link, make, put, setText, table } from "./dom.js";
import { clock, micros, millis, minute, number, percent, plural, timeParts, times } from "./format.js";
import { signal } from "./overview.js";
import { group, hits, phaseLegend, predictedText, requestTable, share } from "./requests.js";
import { called, chartMarks, isDown, isSkewed, outText, store, takes } from "./store.js";
import { tip } from "./tips.js";

const AGAIN = 4000;
/** Recorded decisions from which the page tells why legs come. */
const RECORDED = 200;
const SHOWN = 12;
/** A runner-up that is at most this much dearer was a close call. */
const CLOSE = 0.05;

export function worker(root, [id]) {
  let timer = 0, turn = 0, closed = false, whole = null, recorded = [], read_ms = null;
  const problem = make("p.warn", { role: "status" }), head = make("div"), figures = make("div.part"), why = make("div.cols.even"), ranks = make("div"), requests = requestTable(), more = make("div");
  const load = async () => {
    clearTimeout(timer);
    const mine = (turn += 1);
    try {
      const [one, found] = await Promise.all([get(`workers/${encodeURIComponent(id)}`), get(`decisions?short=true&limit=${RECORDED}&worker=${encodeURIComponent(id)}`)]);
      if (closed || mine !== turn) return;
      [whole, recorded, read_ms] = [one, found.decisions.filter((decision) => !decision.plan), Date.now()];
      setText(problem, "");
      if (!root.contains(head)) lay();
      show();
    } catch (error) {
      if (closed || mine !== turn) return;
      if ([400, 404].includes(error.status)) return void root.replaceChildren(card("", "Worker", null, make("p", null, `Worker ${id} cannot be shown: ${error.message}.`), make("p.mt", null, link("#fleet", "All workers"))));
      setText(problem, `The gateway cannot be read: ${error.message}. ${read_ms ? `What is shown is as of ${clock(read_ms)}.` : "The page tries again."}`);
    }
    timer = setTimeout(load, AGAIN);
  };
  const lay = () => root.replaceChildren(problem, head, figures, why, ranks, card("flush", "Latest requests here", [phaseLegend(), dim("the legs of other workers are on each request’s own page")], requests), more);
  const show = () => {
    const row = store.byId.get(String(id));
    if (!whole || !row || document.hidden) return;
    put(head, heading(whole.worker, row));
    put(figures, signals(whole, row, recorded));
    put(why, reasons(row, recorded), judgement(row, recorded));
    put(ranks, rankTable(whole.worker));
    if (!isPointed(requests)) requests.show(group(recorded).slice(0, SHOWN), "no request of this worker is recorded");
    put(more, configuration(whole.worker));
  };
  crossHair(figures);
  lay();
  load();
  return { kinds: ["fleet"], update: () => void (head.children.length || show()), again: load, close() { closed = true; clearTimeout(timer); } };
}

function heading({ spec, models, health, draining, stuck, ranks }, row) {
  const state = row.out ? `${outText(row)}${row.reason ? `: ${row.reason}` : ""}` : `eligible, ${health}`;
  const kind = !row.out ? "ok" : isDown(row) && health === "unhealthy" ? "failed" : "refused";
  document.title = `${called(row.id, true)} – Pointsman`;
  return make("div.title", null,
    make("div", null, make("p.crumb", null, link("#fleet", "Fleet"), ` / ${spec.role}`, row.zone && ` / zone ${row.zone}`),
      make("h1", null, `${called(row.id, true)} `, make(`span.st.${kind}`, null, state)),
      make("p.dim", null, [spec.url, spec.engine, models.join(", "), ranks.length > 1 && `${ranks.length} ranks`, stuck && `stuck: ${stuck.by}`].filter(Boolean).join(" · "))),
    store.hello.may_change && button("", draining ? "Undrain …" : "Drain …", () => askDrain({ ...row, draining })));
}

function signals({ worker: { engine_load: engine, total_blocks: blocks, ranks }, hour }, row, recorded) {
  const now = Date.now(), last = store.minutes.slice(-hour.legs.length).map((one) => one.at_ms);
  const at = [...last, now], span = spanOf(at, now), numbered = chartMarks(now, span), ends = [minute(now - span), minute(now)];
  const line = (label, values, format, options) => spark({ at, lines: [[...values.slice(-last.length), values.now]], now, marks: numbered, label: `${label} in the last hour`, format, ...options });
  const with_ = (values, present) => Object.assign([...values], { now: present });
  const ttft = Math.max(0, ...ranks.map((rank) => rank.ttft_ewma_us)) / 1e3 || null, itl = Math.max(0, ...ranks.map((rank) => rank.itl_ewma_us)) / 1e3 || null;
  const waits = ranks.reduce((sum, rank) => sum + rank.active_prefill_tokens, 0);
  const found = row.role === "decode" ? null : hits(recorded.map(({ outcome }) => ({ outcome })));
  const limit = row.limit ? `of ${row.limit}` : "";
  const kv = row.kv === null ? null : row.kv;
  return make("div.signals", null,
    signal("share", "Share of legs", [[row.hasShare ? number(row.share, row.share < 10 ? 1 : 0) : "–", row.hasShare ? "× even" : ""]], shareText(row), line("Legs a minute", with_(hour.legs, hour.legs.at(-1) ?? null), (value) => `${number(value)} legs/min`), ends),
    signal("flight", "In flight", [[number(row.in_flight), limit]], waits ? `${number(waits)} prompt tokens wait` : engine?.waiting ? `${number(engine.waiting)} wait in the engine` : "no prompt waits", line("Requests in flight", with_(hour.in_flight, row.in_flight), number, { top: row.limit ?? undefined }), ends),
    signal("kv", "KV cache in use", [percent(kv).split(/\s/)], blocks && kv !== null ? `${number(kv * blocks)} of ${number(blocks)} blocks` : kv === null ? "the engine does not report it" : "", line("KV cache in use", with_(hour.kv_usage, kv), percent, { top: 1 }), ends),
    row.role === "decode"
      ? signal("workerItl", "Time per token", [timeParts(itl)], compared(itl, store.stats?.itl_p50_ms), line("Time per token", with_(hour.itl_ms.map((value) => value || null), itl), millis), ends)
      : signal("workerTtft", row.role === "prefill" ? "Prefill leg" : "First token of a leg", [timeParts(ttft)], row.role === "prefill" ? "until its answer" : "since the leg was sent", line("First token of a leg", with_(hour.ttft_ms.map((value) => value || null), ttft), millis), ends),
    signal("workerCache", "Cache hits", [percent(found?.reported ?? null).split(/\s/)], found ? `${percent(store.stats?.cached_share)} over all workers` : row.role === "decode" ? "prompts are prefilled elsewhere" : "nothing reported yet", make("div.pair", null, found && [found.reported !== null && bar(`${percent(found.reported)} reported`, found.reported), found.predicted !== null && bar(predictedText(found.predicted, recorded), found.predicted)]), ["latest requests", ""]),
    signal("errors", "Errors", [percent(row.errors, 1).split(/\s/)], errorText(row, recorded), line("Errors", with_(hour.error_ppm.map((ppm) => ppm / 1e6), row.errors), (value) => percent(value, 1), { top: Math.max(0.01, row.errors ?? 0, ...hour.error_ppm.map((ppm) => ppm / 1e6)) * 1.1 }), ends));
}

export function shareText({ out, legs, hasShare, part, even }) {
  if (out) return "it gets no request now";
  if (!legs) return "no leg in five minutes";
  return hasShare ? `${percent(part, 1)}; even is ${percent(even, 1)}` : `${plural(legs, "leg")} in five minutes: too few`;
}

/** How the engine says that it has too much to do. */
const REFUSALS = [429, 503, 529];

/** Failed legs, and those that the engine refused, which do not count as failed. */
export function errorText({ failed, legs }, recorded) {
  const text = legs ? `${number(failed)} of ${plural(legs, "leg")} in five minutes` : "no leg in five minutes";
  const sent = recorded.filter(({ outcome }) => outcome?.run), refused = sent.filter(({ outcome: { run } }) => run.failed && REFUSALS.includes(run.status));
  return refused.length ? `${text}; the engine refused ${number(refused.length)} of the latest ${number(sent.length)}` : text;
}

const bar = (name, value) => make("div", null, make("small", null, name), make("span.meter.long", null, make("i", { style: { width: `${100 * value}%` } })));
const compared = (own, all) => (own && all ? `${times(own / all)} the median of all` : "");

const hasCost = ({ choice }) => typeof choice?.cost === "number";

/** Why legs came: most of the prompt cached, another cost, a policy without costs, a binding, or the fallback. */
export function causes(recorded, role) {
  const found = { cached: 0, policy: 0, untold: 0, bound: 0, fallback: 0 };
  for (const one of recorded) {
    const { decider: { by }, outcome } = one;
    const predicted = outcome?.cached_tokens?.predicted ?? 0;
    if (["pin", "session", "plan"].includes(by)) found.bound += 1;
    else if (by === "fallback") found.fallback += 1;
    else if (!hasCost(one)) found.untold += 1;
    else if (role !== "decode" && outcome && predicted * 2 >= outcome.prompt_tokens && predicted > 0) found.cached += 1;
    else found.policy += 1;
  }
  return found;
}

const CAUSES = { cached: ["c1", "most of the prompt cached"], policy: ["c3", "other costs of the policy"], untold: ["c5", "a policy that tells no costs, and so no reason"], bound: ["c2", "session, pin or plan"], fallback: ["c4", "fallback"] };

function reasons(row, recorded) {
  if (!recorded.length) return card("", "Why legs come here", null, make("p.dim", null, "no decision for this worker is recorded"));
  const found = Object.entries(causes(recorded, row.role)).filter(([, count]) => count);
  const first = Math.min(...recorded.map((one) => one.at_ms));
  return card("", "Why legs come here", null,
    make("div.stacked", { "aria-hidden": "true" }, found.map(([name, count]) => make(`i.${CAUSES[name][0]}`, { style: { width: `${(100 * count) / recorded.length}%` } }))),
    make("p.legend", null, found.map(([name, count]) => make("span", null, make(`i.${CAUSES[name][0]}`), `${share(count, recorded.length)} ${CAUSES[name][1]}`))),
    make("p.mt", null, `Of the latest ${number(recorded.length)} ${row.role} decisions for it, since ${minute(first)}.`));
}

/** What a shadow would have done with legs of which it was asked. */
function shadowText(shadows) {
  const sends = shadows.filter(({ answer, agrees }) => answer === "chose" && !agrees);
  const others = [["refused", "refused", "nobody_left"], ["abstained", "abstained"], ["failed", "failed"]]
    .map(([word, ...answers]) => [word, shadows.filter(({ answer }) => answers.includes(answer)).length]).filter(([, count]) => count);
  const rest = others.map(([word, count]) => (word === "refused" ? `would have refused ${share(count, shadows.length)}` : `${word} in ${share(count, shadows.length)}`));
  return `The shadow would have sent ${share(sends.length, shadows.length)} of these legs elsewhere${rest.length ? `; it ${rest.join(", and it ")}` : ""}.`;
}

export function judgement(row, recorded) {
  const lines = [];
  if (row.peers > 1 && row.hasShare) lines.push(`${takes(row, true)}${isSkewed(row) ? ": look whether others could take its legs." : ", which is nothing unusual."}`);
  const known = recorded.filter((one) => hasCost(one) && typeof one.runner_up?.cost === "number");
  const close = known.filter(({ choice, runner_up: second }) => second.cost - choice.cost <= CLOSE * Math.abs(choice.cost));
  if (known.length) lines.push(`In ${number(close.length)} of ${number(known.length)} decisions with costs the runner-up was at most 5\u00a0% dearer.`);
  const asked = recorded.filter(({ shadow }) => shadow);
  if (asked.length) lines.push(shadowText(asked.map(({ shadow }) => shadow)));
  const all = recorded.map(({ outcome }) => outcome?.ttft_ms).filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (all.length && store.stats?.ttft_p50_ms) lines.push(`The median TTFT of the latest requests through it is ${millis(all[Math.floor(all.length / 2)])}; that of all requests in the last minute is ${millis(store.stats.ttft_p50_ms)}.`);
  const slots = [...new Set(recorded.map((one) => one.slot))];
  return card("", "Is it a problem?", null, lines.length ? make("p", null, lines.join(" ")) : make("p.dim", null, "too few decisions to say"), make("p.mt.buttons", null, slots.map((slot) => make("a.btn", { href: `#slot/${slot}` }, `Compare the lanes of ${slot}`)), recorded[0] && make("a.btn", { href: `#request/${recorded[0].id}` }, "Its latest request")));
}

function rankTable({ ranks, spec }) {
  const limit = spec.max_concurrency ? spec.max_concurrency / ranks.length : null, ttft = spec.role === "prefill" ? "prefill leg" : "first token";
  const rows = ranks.map((rank) => make("tr", null, make("td", null, make("b", null, `rank ${rank.dp_rank}`)), make("td.n", { "data-label": "in flight" }, number(rank.active_requests), limit && meter(rank.active_requests / limit)),
    make("td.n", { "data-label": "tokens waiting" }, number(rank.active_prefill_tokens)), make("td.n", { "data-label": "blocks held" }, number(rank.decode_blocks)),
    make("td.n", { "data-label": ttft }, micros(rank.ttft_ewma_us || null)), make("td.n", { "data-label": "ITL" }, micros(rank.itl_ewma_us || null)), make("td.n", { "data-label": "moving errors" }, percent(rank.error_ppm / 1e6, 1))));
  return card("flush", "Ranks", null, table("rows.ranks", ["rank", ["n", tip("flight", "in flight")], ["n", tip("waiting", "tokens waiting")], ["n", tip("held", "blocks held")], ["n", tip("workerTtft", ttft)], ["n", tip("workerItl", "ITL")], ["n", tip("rankErrors", "moving errors")]], rows));
}

function configuration(worker) {
  const { spec, source, engine_load: engine } = worker;
  const pairs = [["id", worker.id_text ?? worker.id], ["source", source], ["labels", Object.entries(spec.labels ?? {}).map((pair) => pair.join("=")).join(", ")], ["topology", Object.entries(spec.topology ?? {}).map((pair) => pair.join("=")).join(", ")],
    ["taints", (spec.taints ?? []).join(", ")], ["block size", worker.block_size], ["engine", engine && `${number(engine.running)} running, ${number(engine.waiting)} waiting, told ${millis(engine.age_ms)} ago`], ["contradiction", worker.contradiction && JSON.stringify(worker.contradiction)]];
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [make("dt", null, name), make("dd", null, typeof value === "object" ? JSON.stringify(value) : value)]);
  return make("section.card", null, make("details", null, make("summary", null, "Configuration and what the engine said"), make("dl.facts", null, shown), make("pre", { tabindex: 0 }, JSON.stringify(worker, null, 2))));
}
