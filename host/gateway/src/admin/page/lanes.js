// The lanes of a slot side by side, with the figures of an hour or less.
import { spark } from "./charts.js";
import { askEnd, askPromote, askRollBack } from "./dialogs.js";
import { button, chip, make } from "./dom.js";
import { millis, minute, number, percent, plural } from "./format.js";
import { callText } from "./overview.js";
import { store } from "./store.js";
import { tip } from "./tips.js";

const LANES = ["active", "canary", "shadow"];
/** Decisions of a lane below which its differences say little. */
const FEW = 100;
/** Times are known to a step of their histogram, 9 %: less than this may be one step. */
const STEP = 0.12;
const isSet = (value) => value !== null && value !== undefined;

/** The rows: label, value of a lane, how to show it, and whether a higher value is better (null: neither). */
const ROWS = [
  [tip.bind(null, "failed", "success"), (lane) => (served(lane) ? 1 - lane.failed / lane.decisions : null), (value) => percent(value, 2), true],
  [tip.bind(null, "ttft", "TTFT p50"), (lane) => lane.ttft_ms?.p50, millis, false],
  [() => "TTFT p90", (lane) => lane.ttft_ms?.p90, millis, false],
  [() => "TTFT p99", (lane) => lane.ttft_ms?.p99, millis, false],
  [tip.bind(null, "itl", "ITL p50"), (lane) => lane.itl_ms?.p50, millis, false],
  [() => "ITL p99", (lane) => lane.itl_ms?.p99, millis, false],
  [tip.bind(null, "hit", "predicted hits"), (lane) => lane.predicted_hit_rate, (value) => percent(value), true],
  [tip.bind(null, "agree", "agreement"), (lane) => (lane.lane === "shadow" ? lane.agreement : null), (value) => percent(value)],
  [tip.bind(null, "fallback", "fallbacks"), (lane) => (lane.decisions ? lane.fallbacks / lane.decisions : null), (value) => percent(value, 2), false],
  [tip.bind(null, "shed", "refused by it"), (lane) => lane.sheds, number],
  [tip.bind(null, "call", "call p99"), (lane) => lane.call_p99_us, null],
];
const served = ({ lane, decisions }) => lane !== "shadow" && decisions > 0;

/** The lanes of a slot: `status` of `/policies`, `lanes` of `/decisions/summary` over so many minutes. */
export function lanesTable(status, lanes, minutes = 60) {
  const shown = LANES.map((name) => lanes.find(({ lane }) => lane === name)).filter(Boolean);
  const active = shown.find(({ lane }) => lane === "active");
  const heads = shown.map((lane) => laneHead(status, lane, shown, minutes));
  const counts = shown.map(({ lane, decisions_by_minute: counts }) => make("td", null, byMinute(counts, lane)));
  const rows = ROWS.map(([label, value, format, better]) => make("tr", null, make("td", null, label()), shown.map((lane) => make("td", null, format ? format(value(lane)) : callText(lane), difference([active ?? {}, lane].map((one) => ({ value: value(one), ...one })), better)))));
  return make("table.lanes", null, make("thead", null, make("tr", null, make("th"), heads)), make("tbody", null, make("tr", null, make("td", null, "by minute"), counts), rows));
}

function byMinute(counts, lane) {
  const now = Date.now(), at = counts.map((_, place) => now - (counts.length - 1 - place) * 60e3);
  const chart = spark({ at, lines: [counts], now, label: `Decisions of ${lane} by minute`, kind: ".mini" });
  return [chart, make("small.dim", null, chart.most)];
}

/** The part of the decisions that a canary made, of the whole minutes since it runs. */
function canaryPart(since, lanes, minutes) {
  const whole = Math.min(minutes, Math.floor((Date.now() - since) / 60e3));
  const [active, canary] = ["active", "canary"].map((name) => (whole && lanes.find(({ lane }) => lane === name)?.decisions_by_minute.slice(-whole).reduce((sum, count) => sum + count, 0)) || 0);
  return canary + active ? ` set, ${percent(canary / (canary + active))} of decisions` : "";
}

function laneHead(status, { lane, generation, policy, native, decisions }, lanes, minutes) {
  // A summary read before a swap belongs to the previous generation.
  const inForce = lane === "active" ? status : status?.[lane], runs = inForce?.generation === generation ? inForce : null;
  const share = status?.canary?.share ?? 0;
  const part = runs && { active: () => `${percent(1 - share)} of sessions`, canary: () => `${percent(share)} of sessions${canaryPart(runs.since_ms, lanes, minutes)}`, shadow: () => `asked for ${percent(runs.share)} of decisions` }[lane]();
  const since = !runs ? "before it ended" : runs.since_ms > Date.now() - minutes * 60e3 ? `since ${minute(runs.since_ms)}` : `in ${minutes} min`;
  const counted = [tip("decisions", plural(decisions, "decision")), lane === "shadow" ? " compared " : " ", since];
  const commands = [];
  if (store.hello.may_change && runs) {
    if (lane === "active") commands.push(status.can_roll_back && button("sub", "Roll back …", () => askRollBack(status)));
    else commands.push(button(lane === "canary" && decisions >= FEW ? "sub.main" : "sub", "Promote …", () => askPromote(status, lane), { "data-key": `promote ${lane}` }), button("sub", "End …", () => askEnd(status, lane), { "data-key": `end ${lane}` }));
  }
  return make("th", { "data-lane": lane }, chip(lane, lane), make("b.name", null, runs ? `${runs.policy} @${runs.generation}` : `${policy ?? native ?? "native"}${generation === null ? "" : ` @${generation}`}`), make("small", null, counted), make("small", null, part), make("div.buttons", null, commands));
}

/** The difference of a trial from the active lane: of shares in points, of times in per cent. Nothing is told of less than what
    the histogram and few decisions make. */
function difference([{ value: base, decisions: most }, { lane, value, decisions }], better) {
  if (lane === "active" || better === undefined || !isSet(base) || !isSet(value)) return null;
  if (Math.min(most, decisions) < FEW || (!better && Math.abs(value / base - 1) < STEP)) return null;
  const text = better ? signed((value - base) * 100, 2, "") : base ? signed((100 * (value - base)) / base, 0, "\u00a0%") : "";
  return text && make(`small.${(value > base) === better ? "good" : "warn"}`, null, text);
}

/** A difference with its sign; nothing when it rounds to 0. */
function signed(value, digits, unit) {
  const text = number(Math.abs(value), Math.abs(value) < 1 ? digits : 0);
  return Number(text) === 0 ? "" : `${value > 0 ? "+" : "−"}${text}${unit}`;
}
