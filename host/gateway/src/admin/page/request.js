// One request: where its time went, and the receipts of its decisions.
import { get } from "./api.js";
import { card, link, make, put } from "./dom.js";
import { clock, millis, number, plural } from "./format.js";
import { receiptCard, receiptText } from "./receipt.js";
import { group, phases } from "./requests.js";
import { rankName, store } from "./store.js";

const MAX_DECISIONS = 40;
/** How often a request in flight is read again, milliseconds. */
const AGAIN = 2000;
/** Width of a text on a phone, as a share of the track: its padding, and each character. */
const [PADDING, CHARACTER] = [0.04, 0.0185];

export function request(root, [id]) {
  let timer = 0, turn = 0, closed = false, isShown = false, isOpen = true;
  const load = async () => {
    clearTimeout(timer);
    const mine = (turn += 1);
    try {
      const shown = await read(id);
      if (closed || mine !== turn) return;
      show(root, id, shown);
      isShown = true;
      isOpen = !shown.request.outcome && shown.request.state[0] === "open";
    } catch (error) {
      if (closed || mine !== turn) return;
      const isGone = [400, 404].includes(error.status);
      isOpen &&= !isGone;
      if (isGone || !isShown) put(root, card("", "Request", null, make("p", null, `The decision ${id} cannot be shown: ${error.message}.`), make("p.mt", null, link("#overview", "Back to the overview"))));
    }
    if (isOpen) timer = setTimeout(load, AGAIN);
  };
  put(root, card("", "Request", null, make("p.dim", null, "loading")));
  load();
  return { kinds: [], update() {}, again: () => isOpen && load(), close() { closed = true; clearTimeout(timer); } };
}

async function read(id) {
  const first = await get(`decisions/${encodeURIComponent(id)}`);
  const same = await get(`decisions?short=true&limit=${MAX_DECISIONS}&request_id=${encodeURIComponent(first.request_id)}`);
  const found = group(same.decisions).find(({ ids }) => ids.includes(first.id)) ?? group([first])[0];
  const receipts = await Promise.all(found.ids.map((one) => (one === first.id ? first : get(`decisions/${encodeURIComponent(one)}`).catch(() => null))));
  return { request: found, receipts: receipts.filter(Boolean) };
}

function show(root, id, { request: found, receipts }) {
  const { outcome, state: [kind, text] } = found;
  document.title = `Request ${found.request_id} – Pointsman`;
  const tokens = outcome ? `, ${number(outcome.prompt_tokens)} prompt tokens, ${number(outcome.output_tokens)} output tokens` : "";
  const order = group(store.decisions), place = order.findIndex(({ ids }) => ids.includes(id));
  const near = (step, label) => (place >= 0 && order[place + step] ? make("a.btn", { href: `#request/${order[place + step].id}` }, label) : null);
  put(root,
    make("div.title", null,
      make("div", null, make("p.crumb", null, link("#overview", "Requests"), ` / ${clock(found.at_ms)}`), make("h1", null, found.request_id), make("p.dim", null, `model ${found.model}${tokens}`)),
      make("div.buttons", null, near(-1, "← newer"), near(1, "older →"))),
    card("", "Where the time went", [make(`span.st.${kind}`, null, outcome ? `${outcome.status} ${outcome.code}` : text), outcome && make("span.dim.end", null, `ended after ${millis(outcome.duration_ms)}`)],
      make("p.say", null, ...story(found)), outcome && timeline(found)),
    receipts.map(receiptCard),
    make("section.card", null, make("details", null, make("summary", null, `Receipts as JSON (${receipts.length})`), receipts.map((one) => make("pre", { tabindex: 0 }, receiptText(one))))));
}

const workerOf = (found, wanted) => {
  const leg = found.workers.find((one) => one.leg === wanted) ?? found.workers.find((one) => one.leg === "aggregated");
  return leg ? link(`#worker/${leg.id}`, rankName(leg.id, leg.rank)) : "";
};

/** The failed attempts: the leg, its worker and the cause. */
const causes = ({ attempts }) => attempts.flatMap(({ leg, id, rank, why }, place) => [place ? ", " : "", `${leg} on `, link(`#worker/${id}`, rankName(id, rank)), ` (${why})`]);

/** Says in words where the time of a request went. */
export function story(found) {
  const { outcome } = found;
  const bold = (text) => make("b", null, text);
  if (!outcome) return [found.state[0] === "open" ? "The request is in flight; this page follows it." : `The gateway refused the request: ${found.state[1]}.`];
  const list = phases(found), length = (kind) => list.filter((one) => one.kind === kind).reduce((sum, one) => sum + one.to - one.from, 0);
  if (outcome.ttft_ms === null) {
    if (outcome.status === 499) return ["The client left after ", bold(millis(outcome.duration_ms)), ", before the first token."];
    const failed = outcome.status >= 400 ? `The request ended with ${outcome.status} ${outcome.code} after ` : "The answer was not streamed, so nothing is known of its first token. It took ";
    return [failed, bold(millis(outcome.duration_ms)), "."];
  }
  const median = store.stats?.ttft_p50_ms;
  const against = median ? `, ${number(outcome.ttft_ms / median, 1)} times the median of the last minute` : "";
  const [most] = ["gateway", "queue", "failed", "prefill", "transfer"].map((kind) => [kind, length(kind)]).sort((a, b) => b[1] - a[1]);
  const words = { gateway: ["reading and routing in the gateway"], queue: ["the queue in the gateway"], failed: [`${found.attempts.length > 1 ? `${number(found.attempts.length)} attempts` : "an attempt"} that failed: `, ...causes(found)], prefill: ["prefill on ", workerOf(found, "prefill")], transfer: ["the transfer to ", workerOf(found, "decode"), " and its first step"] }[most[0]];
  const left = outcome.output_tokens - 1;
  return ["The client waited ", bold(millis(outcome.ttft_ms)), ` for its first token${against}. ${most[1] * 2 > outcome.ttft_ms ? "Most of it" : "The largest part"}, `, bold(millis(most[1])), ", was ", ...words, ".",
    ...(left > 0 && outcome.itl_ms !== null ? [` Then ${number(left)} more ${left === 1 ? "token" : "tokens"} came from `, workerOf(found, "decode"), ", one every ", bold(millis(outcome.itl_ms)), "."] : []),
    outcome.status === 499 ? ` The client left after ${millis(outcome.duration_ms)}.` : ""];
}

/** Up to five round times from 0 on, with room for the end after the last. */
function roundTicks(all) {
  const unit = 10 ** Math.floor(Math.log10(all / 5)), step = unit * [1, 2, 5, 10].find((factor) => 5 * factor * unit > 0.8 * all);
  return [0, 1, 2, 3, 4].map((place) => place * step).filter((ms) => ms <= 0.8 * all);
}

const room = (text) => PADDING + CHARACTER * text.length;

/** Where the text of a bar stands, so that it fits: in the bar, before it or after it. */
export function placeOf({ from, to }, all, text) {
  if ((to - from) / all >= room(text)) return "inside";
  return to / all > 1 - room(text) ? "before" : "after";
}

function timeline(found) {
  const { outcome } = found, all = outcome.duration_ms;
  const at = (ms) => `${((100 * ms) / all).toFixed(2)}%`;
  const names = {
    gateway: () => ["Reading and routing"], queue: () => ["Queue in the gateway"], failed: (attempt) => ["Failed: ", ...causes({ attempts: [attempt] })],
    prefill: () => ["Prefill on ", workerOf(found, "prefill")], transfer: () => ["Transfer, first step on ", workerOf(found, "decode")],
    decode: () => ["Decode on ", workerOf(found, "decode")], whole: () => ["Answer of ", workerOf(found, "aggregated")],
  };
  const rows = phases(found).flatMap(({ kind, from, to, attempt }) => {
    const text = millis(to - from) + (kind === "decode" ? `, ${outcome.ttft_ms === null ? plural(outcome.output_tokens, "token") : plural(Math.max(0, outcome.output_tokens - 1), "more token")}` : "");
    const place = placeOf({ from, to }, all, text), style = { inside: { left: at(from) }, before: { right: at(all - from) }, after: { left: at(to) } }[place];
    return [make("span.what", null, names[kind](attempt)), make("div.track", null, make(`i.${kind}`, { style: { left: at(from), width: at(to - from) } }), make(`span${place === "inside" ? `.inside.${kind}` : ""}`, { style }, text))];
  });
  const ticks = roundTicks(all).map((ms) => make("span", { style: { left: at(ms) } }, millis(ms)));
  const label = `first token ${millis(outcome.ttft_ms)}`, late = outcome.ttft_ms / all > 1 - room(label);
  const first = outcome.ttft_ms !== null && make("div.over", null, make("div.first", { style: { left: at(outcome.ttft_ms) } }, make(`b${late ? ".late" : ""}`, null, label)));
  return make("div.timeline", null, make("span"), make("div.scale", null, ticks, make("span.last", null, millis(all))), rows, first);
}
