// Charts as SVG: lines of an hour, the spread of legs over workers, distributions.
import { draw, make } from "./dom.js";
import { minute, number, plural, times } from "./format.js";
import { called, heat, sharing } from "./store.js";

const HOUR = 3600e3;
const MINUTE = 60e3;
const SHORTEST = 5 * MINUTE;

/** The time that charts show: an hour, or less while there is less. */
export const spanOf = (at, now) => Math.min(HOUR, Math.max(SHORTEST, now - (at[0] ?? now) + MINUTE));
/** Workers that the spread shows one by one: in a curve of many, a single hot one would be one pixel wide. */
const BUSIEST = 16;

/** The path of a line through points `[x, y]`; null values break it. */
function path(points) {
  let pen = "M";
  const part = ([x, y]) => {
    if (y === null || y === undefined) {
      pen = "M";
      return "";
    }
    const text = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
    return text;
  };
  return points.map(part).join("");
}

/** The areas below a line, one for each run of points without a gap. */
function area(points) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] !== null) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length > 1).map((run) => `${path(run)}L${run.at(-1)[0].toFixed(1)} 100L${run[0][0].toFixed(1)} 100Z`).join("");
}

/**
 * Lines of the last hour or less on one scale. `lines` are lists of values at `at` (milliseconds); the first has an area
 * below it. `marks` are numbered changes. `most` of the chart says its highest value.
 */
export function spark({ at, lines, now, span = spanOf(at, now), low = 0, top, marks = [], label, format = number, kind = "" }) {
  const values = lines.flat().filter((value) => value !== null && value !== undefined);
  const high = top ?? (Math.max(low + 1e-9, ...values) - low) * 1.08 + low;
  const x = (time) => (100 * (time - now + span)) / span;
  const y = (value) => (value === null || value === undefined ? null : 100 - (100 * (value - low)) / (high - low));
  const points = lines.map((line) => line.map((value, place) => [x(at[place]), y(value)]));
  const svg = draw("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const known = points[0].filter(([, height]) => height !== null);
  if (known.length > 1) {
    svg.append(draw("path", { class: "area", d: area(points[0]) }));
    points.forEach((line, place) => svg.append(draw("path", { class: `line${place}`, d: path(line) })));
  }
  const node = make(`div.spark${kind}`, { role: "img", "aria-label": label }, svg);
  node.most = known.length > 1 ? `max ${format(Math.max(...values))}` : "";
  for (const { at_ms: time, label: mark, isBad } of marks.filter((one) => one.at_ms >= now - span)) {
    node.append(make(`i.mark${isBad ? ".bad" : ""}${mark.length > 1 ? ".many" : ""}`, { "data-number": mark, style: { left: `${x(time).toFixed(1)}%` } }));
  }
  if (known.length < 2) node.append(make("span.wait", null, "the line needs two minutes"));
  node.lookup = (share) => {
    const time = now - span + share * span;
    let best = 0;
    for (let place = 1; place < at.length; place += 1) if (Math.abs(at[place] - time) < Math.abs(at[best] - time)) best = place;
    return at.length ? { at: at[best], share: x(at[best]), text: lines.map((line) => format(line[best])).join(" / ") } : null;
  };
  return node;
}

/** Shows one minute in all charts of a row while the pointer is above one of them. */
export function crossHair(row) {
  const clear = () => {
    for (const cross of row.querySelectorAll(".cross")) cross.remove();
    for (const text of row.querySelectorAll(".now")) text.textContent = "";
  };
  row.addEventListener("pointermove", ({ target, clientX }) => {
    clear();
    const under = target.closest?.(".spark");
    if (!under) return;
    const { left, width } = under.getBoundingClientRect();
    for (const one of row.querySelectorAll(".spark")) {
      const found = one.lookup?.(Math.min(1, Math.max(0, (clientX - left) / width)));
      if (!found) continue;
      one.append(make("i.cross", { style: { left: `${found.share}%` } }));
      const text = one.parentNode.querySelector(".now");
      if (text) text.textContent = `${minute(found.at)}  ${found.text}`;
    }
  });
  row.addEventListener("pointerleave", clear);
  return row;
}

/** A bar for a share of a limit. */
export const meter = (value) =>
  make("span.meter", { "aria-hidden": "true" }, make(`i${value >= 0.9 ? ".over" : value >= 0.75 ? ".hot" : ""}`, { style: { width: `${Math.min(100, value && Math.max(2, 100 * value))}%` } }));

/** The busiest workers of a role as bars and the others as one area, against an even share. */
export function spread(role) {
  const list = sharing(role);
  if (!list.length) return make("p.dim", null, "no two eligible workers share its legs");
  if (!list[0].legs) return make("p.dim", null, "no leg in the last five minutes");
  if (!list[0].hasShare) return make("p.dim", null, `${plural(list.reduce((sum, { legs }) => sum + legs, 0), "leg")} in the last five minutes: too few to compare`);
  const ranks = list.reduce((sum, worker) => sum + worker.ranks, 0);
  const top = Math.max(list.length > 4 ? 4 : 1.5, list[0].share) * 1.05;
  const first = list.slice(0, BUSIEST), others = list.slice(BUSIEST);
  const wide = others.length ? 60 : 100, step = Math.min(16, wide / first.length);
  const height = (share) => (100 * share) / top;
  const level = (worker) => ["", "hot", "over"][heat(worker)];
  const svg = draw("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" },
    first.map((worker, place) => draw("rect", { class: level(worker), x: place * step, y: 100 - height(worker.share), width: step * 0.8, height: height(worker.share) })));
  if (others.length) {
    const points = others.map(({ share }, place) => [61.5 + (38.5 * place) / Math.max(1, others.length - 1), 100 - height(share)]);
    svg.append(draw("path", { d: `${path(points)}L100 100L61.5 100Z` }));
  }
  const busiest = `${called(list[0].id)}: ${times(list[0].share)}`;
  return make("div", null,
    make("div.spread", { role: "img", "aria-label": `The busiest ${role} worker, ${called(list[0].id)}, has ${number(list[0].share, 1)} times an even share` }, svg,
      make("div.even", { style: { bottom: `${height(1)}%` } }, make("small", null, "even share")),
      make(`b${heat(list[0]) ? ".warn" : ".dim"}`, null, busiest)),
    make("div.axis", null, make("span", null, others.length ? `the ${BUSIEST} highest` : `${list.length} workers${ranks > list.length ? ` with ${ranks} ranks` : ""}, highest share first`), others.length ? make("span", null, `the other ${number(others.length)} workers`) : null));
}

const PLOT = { width: 440, height: 190, left: 40, right: 12, top: 12, bottom: 24 };

/** Distributions: the share of requests up to a time, which is on a logarithmic axis. `lanes` have `[ms, share]`. */
export function distribution(lanes, label, format) {
  const at = lanes.flatMap(({ points }) => points.map(([ms]) => ms));
  if (!at.length) return make("p.dim", null, "nothing measured in this window");
  const [low, high] = [Math.log(Math.min(...at) / 1.15), Math.log(Math.max(...at) * 1.15)];
  const { width, height, left, right, top, bottom } = PLOT;
  const x = (ms) => left + ((width - left - right) * (Math.log(ms) - low)) / (high - low);
  const y = (share) => height - bottom - (height - top - bottom) * share;
  const svg = draw("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 0.9, 1]) {
    svg.append(draw("path", { class: "grid", d: `M${left} ${y(share)}H${width - right}` }), draw("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, share * 100));
  }
  for (let place = 0; place <= 3; place += 1) {
    const ms = Math.exp(low + ((high - low) * place) / 3);
    svg.append(draw("text", { x: x(ms), y: height - 6, "text-anchor": ["start", "middle", "middle", "end"][place] }, format(ms)));
  }
  for (const { lane, points } of lanes) {
    svg.append(draw("path", { class: `lane ${lane}`, d: path([[x(Math.exp(low)), y(0)], ...points.map(([ms, share]) => [x(ms), y(share)])]) }));
  }
  return svg;
}
