// The page's comparison of active, canary and shadow over the last hour: a table and plots for each slot.
// page.js has the helpers for elements, numbers and requests.
"use strict";

const COMPARE_INTERVAL = 10000;
const PLOT = { width: 300, height: 120, left: 34, bottom: 18, top: 6, right: 6 };
const LANE_NAMES = ["active", "canary", "shadow"];
let compareTimer = 0;

/** Returns a new SVG element with attributes and children. */
function draw(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const percent = (share) => (share === null || share === undefined ? "–" : `${number(share * 100, 1)} %`);

/** Opens or closes the view. It is read again while it is open. */
function toggleCompare() {
  const open = $("compare").hidden;
  $("compare").hidden = !open;
  $("show-compare").setAttribute("aria-expanded", String(open));
  clearTimeout(compareTimer);
  if (open) return loadCompare();
}

async function loadCompare() {
  try {
    const response = await fetch("decisions/summary", { headers: authorization() });
    const text = await response.text();
    if (response.ok) showCompare(parse(text));
    else setText($("compared"), response.status === 401 || response.status === 403 ? "token required" : `failed: ${response.status}`);
  } catch {
    setText($("compared"), "failed: the gateway does not answer");
  }
  clearTimeout(compareTimer);
  if (!$("compare").hidden) compareTimer = setTimeout(loadCompare, COMPARE_INTERVAL);
}

/** Shows the slots that decided anything, or that have a canary or shadow. */
function showCompare({ window_s, slots }) {
  const used = slots.filter((slot) => slot.lanes.length > 1 || slot.lanes.some((lane) => lane.decisions));
  setText($("compared"), used.length ? `the last ${number(window_s / 60)} minutes` : "no decisions in the last hour");
  syncChildren($("lanes"), used, (slot) => `${slot.slot} ${slot.model ?? ""}`, () => make("article", "slot lanes"), showLanes);
}

function showLanes(node, slot) {
  const head = make("tr", "", make("th"), ...slot.lanes.map((lane) => make("th", `n ${lane.lane}`, lane.lane)));
  const body = LANE_ROWS.map(([name, title, value]) => {
    const label = make("th", "", name);
    label.title = title;
    return make("tr", "", label, ...slot.lanes.map((lane) => make("td", "n", value(lane))));
  });
  const table = make("table", "", make("thead", "", head), make("tbody", "", ...body));
  const plots = [
    distributionPlot("TTFT, share of requests", slot.lanes, "ttft_ms"),
    distributionPlot("ITL, share of requests", slot.lanes, "itl_ms"),
    minutePlot("decisions a minute", slot.lanes),
  ];
  node.replaceChildren(make("h3", "", slot.slot, make("span", "dim", slot.model ?? "")), table, make("div", "plots", ...plots.filter(Boolean)));
}

const timeOf = (key, quantile) => (lane) => formatMillis(lane[key]?.[quantile]);
const LANE_ROWS = [
  ["policy", "what runs in the lane now", (lane) => (lane.generation === null ? "ended" : `${lane.policy ?? lane.native ?? "native"} @${lane.generation}`)],
  ["decisions", "decisions of requests that ended within the window; those of a shadow were not acted on", (lane) => number(lane.decisions)],
  ["agrees", "share of the decisions that active and shadow both made in which they chose the same", (lane) => (lane.lane === "canary" ? "–" : percent(lane.agreement))],
  ["TTFT p50", "median time to first token; nothing is measured of a shadow", timeOf("ttft_ms", "p50")],
  ["TTFT p90", "", timeOf("ttft_ms", "p90")],
  ["TTFT p99", "", timeOf("ttft_ms", "p99")],
  ["ITL p50", "median of the mean time between tokens of a request", timeOf("itl_ms", "p50")],
  ["ITL p90", "", timeOf("itl_ms", "p90")],
  ["E2E p50", "median duration of a request", timeOf("e2e_ms", "p50")],
  ["E2E p90", "", timeOf("e2e_ms", "p90")],
  ["predicted hits", "share of prompt blocks expected to be cached at the choice", (lane) => percent(lane.predicted_hit_rate)],
  ["fallbacks", "decisions by the native fallback", (lane) => number(lane.fallbacks)],
  ["sheds", "requests that the lane refused", (lane) => number(lane.sheds)],
];

/** Plots the distributions of a time, one line for each lane with measurements; the time axis is logarithmic. */
function distributionPlot(title, lanes, key) {
  const measured = lanes.filter((lane) => lane[key]?.cdf.length);
  if (!measured.length) return null;
  const times = measured.flatMap((lane) => lane[key].cdf.map(([at]) => at));
  const [low, high] = [Math.log(Math.min(...times) / 1.1), Math.log(Math.max(...times) * 1.1)];
  const x = (at) => (Math.log(at) - low) / (high - low);
  const lines = measured.map((lane) => {
    let before = 0;
    // A step at each point: the share jumps where the times lie.
    const steps = lane[key].cdf.flatMap(([at, share]) => {
      const step = [[x(at), before], [x(at), share]];
      before = share;
      return step;
    });
    return [lane.lane, [...steps, [1, before]]];
  });
  return plot(title, lines, [formatMillis(Math.exp(low)), formatMillis(Math.exp(high))], ["0", "100 %"]);
}

/** Plots the decisions of each minute. */
function minutePlot(title, lanes) {
  const most = Math.max(1, ...lanes.flatMap((lane) => lane.decisions_by_minute));
  const lines = lanes.filter((lane) => lane.decisions).map(({ lane, decisions_by_minute: counts }) =>
    [lane, counts.map((count, place) => [place / Math.max(1, counts.length - 1), count / most])]);
  const minutes = lanes[0].decisions_by_minute.length;
  return lines.length ? plot(title, lines, [`${minutes} min ago`, "now"], ["0", number(most)]) : null;
}

/** Draws lines of points from 0 to 1, with the names of the ends of both axes. */
function plot(title, lines, [left, right], [bottom, top]) {
  const { width, height } = PLOT;
  const [x0, x1, y0, y1] = [PLOT.left, width - PLOT.right, height - PLOT.bottom, PLOT.top];
  const at = ([x, y]) => `${(x0 + x * (x1 - x0)).toFixed(1)},${(y0 + y * (y1 - y0)).toFixed(1)}`;
  const text = (x, y, anchor, label) => draw("text", { x, y, "text-anchor": anchor }, label);
  const names = lines.map(([lane]) => lane).join(", ");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${names}` },
    draw("path", { class: "axis", d: `M${x0},${y1}V${y0}H${x1}` }),
    text(x0, height - 4, "start", left), text(x1, height - 4, "end", right),
    text(x0 - 4, y0, "end", bottom), text(x0 - 4, y1 + 8, "end", top),
    ...lines.map(([lane, points]) => draw("polyline", { class: LANE_NAMES.includes(lane) ? lane : "", points: points.map(at).join(" ") })));
  return make("figure", "", make("figcaption", "dim", title), svg);
}

$("show-compare").addEventListener("click", toggleCompare);
