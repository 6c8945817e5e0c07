// One slot: its lanes side by side, its files, and its history.
import { get } from "./api.js";
import { distribution } from "./charts.js";
import { askReload } from "./dialogs.js";
import { button, card, chip, choice, dim, link, make, put } from "./dom.js";
import { age, digest, millis, minute, number, percent } from "./format.js";
import { lanesTable } from "./lanes.js";
import { changeText } from "./overview.js";
import { isBad, openRefusals, rankName, idOf, sameSlot, slotHref, slotName, store } from "./store.js";
import { explained, tip } from "./tips.js";

const AGAIN = 5000;
const WINDOWS = [["15m", "15 min"], ["60m", "hour"]];
const MAX_HISTORY = 12;
const PURPOSE = {
  prefill: "chooses the worker of the prefill leg", decode: "chooses the worker of the decode leg", aggregated: "chooses the worker that answers a request alone",
  "decode-override": "decides whether a request is prefilled apart, on its decode worker, or refused",
};

export function slot(root, [kind, model]) {
  let window = "60m", lanes = [], timer = 0, closed = false;
  const find = () => store.slots.slots.find((one) => sameSlot(one, { slot: kind, model: model ?? null })) ?? (kind ? null : store.slots.slots[0]);
  const head = make("div"), table = make("div"), note = make("p.quiet"), below = make("div.cols.even");
  const windows = choice("Window", WINDOWS, window, (value) => {
    window = value;
    load();
  });
  const load = async () => {
    clearTimeout(timer);
    const mine = window, status = find();
    if (status) {
      try {
        const { slots } = await get(`decisions/summary?window=${mine}`);
        if (closed || mine !== window) return;
        lanes = slots.find((one) => sameSlot(one, status))?.lanes ?? [];
        show(true);
      } catch { /* read again soon */ }
    }
    if (!closed) timer = setTimeout(load, status ? AGAIN : 300);
  };
  const show = (measured) => {
    const status = find();
    if (!status) return put(head, make("h1", null, store.slots.slots.length ? "There is no such slot" : "Slots"), make("p", null, others()));
    put(head, heading(status));
    if (lanes.length) put(table, lanesTable(status, lanes, parseInt(window, 10)));
    put(note, notes(lanes));
    if (measured || !below.children.length) put(below, make("div.stack", null, plots(lanes), history(status)), make("div.stack", null, files(status)));
    else put(below.lastChild, files(status));
  };
  put(root, head, make("section.card.flush", null, make("div.head", null, make("h2", null, tip("lanes", "Lanes"), " side by side"), dim("differences from active, once both lanes have 100 decisions"), make("div.end", null, windows)), table, note), below);
  load();
  return { kinds: ["slots"], update: () => void show(false), close() { closed = true; clearTimeout(timer); } };
}

const others = () => store.slots.slots.map((one, place) => [place ? " · " : "", link(slotHref(one), slotName(one))]);

function heading(status) {
  document.title = `Slot ${slotName(status)} – Pointsman`;
  const state = status.breaker_open ? chip("no", "fallback serves") : chip("active", status.state === "default" ? "serving, as configured" : status.state === "active" ? "serving" : "serving after a rollback");
  const nav = make("nav.slots", { "aria-label": "Slots" }, store.slots.slots.map((one) => make("a", { href: slotHref(one), "aria-current": sameSlot(one, status) ? "true" : null }, slotName(one))));
  const for_ = status.model ? `for the model ${status.model}` : "for every model without a slot of its own";
  return make("div.title", null, make("div", null, make("p.crumb", null, link("#overview", "Overview"), " / slots"), make("h1", null, `Slot ${slotName(status)} `, state), make("p.dim", null, `${PURPOSE[status.slot] ?? ""} ${for_}`), warnings(status)), nav);
}

function warnings(status) {
  const lines = [];
  for (const [lane, only] of [["", status.only_choice], ["canary: ", status.canary?.only_choice]]) {
    if (only) lines.push(make("p.warn", null, `${lane}the last ${number(only.decisions)} decisions all chose `, link(`#worker/${idOf(only)}`, rankName(idOf(only), only.dp_rank))));
  }
  const failure = status.last_failure;
  if (status.failures) lines.push(make("p.bad", null, `${number(status.failures)} of ${number(status.calls)} calls failed${failure ? `; the last one: ${failure.message ?? failure.kind ?? JSON.stringify(failure)}` : ""}`));
  return lines;
}

function notes(lanes) {
  const canary = lanes.find(({ lane }) => lane === "canary"), text = [];
  if (canary?.ttft_ms) text.push(`p99 of the canary rests on its ${number(Math.max(1, Math.round(canary.ttft_ms.count / 100)))} slowest of ${number(canary.ttft_ms.count)} requests.`);
  if (lanes.some(({ lane }) => lane === "shadow")) text.push("A shadow serves no request, so it has no latencies; agreement says how often it would have chosen the same worker.");
  if (!lanes.some(({ decisions }) => decisions)) text.push("Nothing was decided within the window.");
  return text.join(" ");
}

function plots(lanes) {
  const of = (key) => lanes.filter((lane) => lane[key]?.cdf.length).map((lane) => ({ lane: lane.lane, points: lane[key].cdf }));
  const legend = make("span.end.legend", null, of("ttft_ms").map(({ lane }) => make("span", null, make(`i.lane-${lane}`), lane === "canary" ? "canary, dashed" : lane)));
  return card("", "TTFT: share of requests up to a time, %", legend, distribution(of("ttft_ms"), "Share of requests by time to first token", millis));
}

function history(status) {
  const lines = store.slots.history.filter((one) => sameSlot(one, status)).slice(-MAX_HISTORY).reverse();
  return card("", "History", null, lines.length
    ? make("ol.log", null, lines.map((one) => make("li", null, make(`i.dot.small${isBad(one) ? ".bad" : ""}`), make("time", null, minute(one.at_ms)), make("span", null, `${one.lane}: ${changeText(one)}`))))
    : make("p.dim", null, "no change since the gateway started"));
}

/** Files of the slot: refused, compiling, quarantined, of no slot, and in force. */
function files(status) {
  const refused = openRefusals(status).slice(0, 6), compiling = store.slots.compiling.filter((one) => sameSlot(one, status));
  const open = new Set(refused.map((one) => one.digest));
  const file = (kind, label, name, more, text) => make("li", null, chip(kind, label), make("div", null, make("b.mono", null, name), more && dim(` ${more}`)), make("p", null, text));
  const keeps = (lane) => (lane === "active" ? `${status.policy} @${status.generation}` : status[lane] ? `${status[lane].policy} @${status[lane].generation}` : "nothing");
  const lines = [
    ...refused.map((one) => file("no", `refused ${minute(one.at_ms)}`, one.file, digest(one.digest), [make("b", null, one.kind.replaceAll("_", " ")), `: ${one.message}. The lane ${one.lane} keeps ${keeps(one.lane)}.`])),
    ...compiling.map((one) => file("wait", "compiling", one.file, null, `for ${age(Math.max(0, Date.now() - one.since_ms))} so far. The lane ${one.lane} keeps ${keeps(one.lane)} until it is ready.`)),
    ...status.quarantined.filter((one) => !open.has(one)).map((one) => file("no", "quarantined", digest(one), null, "It was rolled back or ended. It does not come back until its file or settings change.")),
    ...store.slots.strays.map((name, at) => file("wait", "no slot", name, null, store.slots.stray_problems[at])),
    ...(store.slots.more_strays ? [file("wait", "no slot", `${store.slots.more_strays} more files`, null, "They are not listed.")] : []),
    ...[["active", status], ["canary", status.canary], ["shadow", status.shadow]].filter(([, lane]) => lane).map(([name, lane]) => file("active", `in force`, `${name}: ${lane.policy} @${lane.generation}`, digests(lane), inForce(status, name, lane))),
  ];
  const again = store.hello.may_change && button("link.end", "read the folder again", askReload);
  return card("", "Files of this slot", again, make("ul.files", null, lines));
}

/** The digests of the filters of a lane, and of the policy that ranks. */
export const digests = ({ digest: ranker, parts }) => [...(parts ?? []).filter(({ world }) => world === "filter").map((part) => part.digest), ranker].filter(Boolean).map(digest).join("+");

function inForce(status, name, lane) {
  const parts = (lane.parts ?? []).map((part) => `${part.world} ${part.policy} ${part.version}${part.weight === null || part.weight === undefined ? "" : ` × ${number(part.weight, 2)}`}`);
  const calls = `${number(lane.calls)} calls since ${minute(lane.since_ms)}${lane.failures ? `, ${number(lane.failures)} failed` : ""}`;
  const text = [parts.join(" → ") || lane.policy, `grants: ${lane.grants.join(", ") || "none"}`, calls].join(" · ");
  return [text, name === "active" && status.memory ? [" · ", tip("state", "state"), " ", usage(status.memory)] : ""];
}

/** How full the state of a slot's policies is; the fuller of keys and bytes sets the colour. */
export function usage(memory) {
  const full = Math.max(memory.entries / memory.entries_limit, memory.bytes / memory.bytes_limit);
  const kind = full > 0.9 ? "bad" : full > 0.7 ? "warn" : "dim";
  return make(`span.${kind}`, null, explained(`${number(memory.entries)} of ${number(memory.entries_limit)} keys, ${number(memory.bytes)} of ${number(memory.bytes_limit)} bytes`, `${number(memory.entries)} keys, ${percent(full)} full`));
}
