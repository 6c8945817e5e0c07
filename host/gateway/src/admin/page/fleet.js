// The fleet: a cell for each worker, coloured by one figure, and the spread of legs.
import { spread } from "./charts.js";
import { choice, dim, isPointed, link, make, put, render, setText } from "./dom.js";
import { number, percent, times } from "./format.js";
import { workerRow, workerTable } from "./overview.js";
import { called, heat, HOT, isOut, nameOf, notable, ofRole, outText, roles, sharing, store, takes, urlOf, whereOf } from "./store.js";
import { tip } from "./tips.js";

/** Fleets of fewer workers are a table. */
const MIN_CELLS = 60;
/** How often the spread is drawn, milliseconds. */
const SIDE = 4900;
/** The share that a colour stands for: pale where there are too few legs, and hot only of enough. */
function shownShare(worker) {
  if (!worker.hasShare) return 0;
  return heat(worker) ? worker.share : Math.min(worker.share, HOT[0] - 0.01);
}

/** Bounds and names of each colour, from pale to hot. */
const SCALES = {
  share: { name: "share of legs", of: shownShare, bounds: [0.25, 0.5, 0.8, 1.2, 1.7, ...HOT], names: ["under ¼", "¼", "½", "even", "1.2×", "1.7×", "3×", "over 6×"], text: (worker) => (worker.hasShare ? `${times(worker.share)} its even share` : "too few legs for a share") },
  load: { name: "load", of: (worker) => worker.load, bounds: [0.15, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95], names: ["under 15 %", "15", "30", "45", "60", "75", "88", "over 95 %"], text: (worker) => (worker.limit ? `${worker.in_flight} of ${worker.limit} in flight` : `${worker.in_flight} in flight`) },
  errors: { name: "errors", of: (worker) => worker.errors ?? 0, bounds: [1e-6, 1e-6, 1e-6, 1e-6, 0.01, 0.02, 0.05], names: ["none", "", "", "", "under 1 %", "1 %", "2 %", "over 5 %"], text: (worker) => `${percent(worker.errors, 1)} errors` },
  kv: { name: "KV in use", of: (worker) => worker.kv ?? 0, bounds: [0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92], names: ["under 15 %", "15", "30", "45", "60", "75", "85", "over 92 %"], text: (worker) => (worker.kv === null ? "KV unknown" : `KV ${percent(worker.kv)}`) },
};

export function fleet(root, [colour]) {
  let drawn = 0;
  const view = { by: colour in SCALES ? colour : "share", order: "name", words: [], current: null, ids: new Map(), spoken: make("p.hidden-title", { role: "status" }) };
  const title = make("div"), legend = make("p.legend.scale"), blocks = make("div.blocks"), about = make("div.about", { id: "about" }), side = make("div.stack");
  const input = make("input.end", { type: "search", placeholder: "id, address, zone, draining …", "aria-label": "Find workers", oninput: ({ target }) => {
    view.words = target.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    paint(view, legend, blocks, about);
  } });
  const set = (key) => (value) => {
    view[key] = value;
    paint(view, legend, blocks, about);
  };
  view.colours = choice("Colour by", Object.entries(SCALES).map(([key, { name }]) => [key, name]), view.by, set("by"));
  const controls = make("div.head.controls", null, view.colours, choice("Order", [["name", "by name"], ["value", "highest first"]], view.order, set("order")), input);
  put(root, title, make("div.cols.top", null, make("section.card", null, controls, legend, blocks, about, view.spoken), side));
  return {
    kinds: ["fleet"],
    update() {
      render(title, headline(), heading);
      paint(view, legend, blocks, about);
      if (Date.now() - drawn < SIDE) return ["fleet"];
      drawn = Date.now();
      put(side, roles().map((role) => make("section.card", null, make("div.head", null, make("h2", null, tip("spread", `Spread of ${role} legs`))), spread(role), make("p.mt", null, spreadText(role)))), worthALook());
      return [];
    },
    close() {},
  };
}

function headline() {
  const counts = new Map();
  for (const worker of store.workers) counts.set(worker.out ?? "eligible", (counts.get(worker.out ?? "eligible") ?? 0) + 1);
  const text = [...counts].sort((a, b) => b[1] - a[1]).map(([state, count]) => `${number(count)} ${state.replaceAll("_", " ")}`).join(", ");
  return `${number(store.workers.length)} workers${text ? `: ${text}` : ""}`;
}

const heading = () => make("div.title", null, make("div", null, make("h1", null, "Fleet"), make("p.dim", null, headline())));

function spreadText(role) {
  const list = sharing(role);
  if (!list.length || !list[0].hasShare) return "";
  const most = Math.max(1, Math.round(list.length / 100)), legs = (some) => some.reduce((sum, worker) => sum + worker.legs, 0), part = legs(list.slice(0, most)) / legs(list);
  const half = list[Math.floor(list.length / 2)].share;
  if (list.length < 20) return `${takes(list[0], true)}. ${takes(list.at(-1), true)}.`;
  const rest = half < 0.05 ? "Half of the workers get almost none." : `Half of the workers get less than ${times(half)} their even share.`;
  return `The 1\u00a0% of the workers with the highest shares (${most}) take ${percent(part, 1)} of the legs, and ${called(list[0].id)} alone ${percent(list[0].part, 1)}. ${rest}`;
}

const NO_WORKER = "no worker is registered";

function worthALook() {
  const found = notable();
  return make("section.card", null, make("div.head", null, make("h2", null, "Worth a look")),
    found.length ? make("ol.log.wide", null, found.map(({ worker, text, more }) => make("li", null, link(`#worker/${worker.id}`, nameOf(worker.id)), make("span", null, text, more ? `; ${more} more` : "")))) : make("p.dim", null, !store.workers.length ? NO_WORKER : store.stats?.ready === false ? "the gateway is not ready; the overview says why" : "nothing stands out"));
}

function isMatch(worker, words) {
  const text = [worker.id, nameOf(worker.id), urlOf(worker), worker.role, worker.zone ?? "", worker.out ?? "eligible", worker.reason ?? ""].join(" ").toLowerCase();
  return words.filter((word) => word !== "zone").every((word) => (word.length === 1 && worker.zone ? worker.zone.toLowerCase() === word || text.includes(` ${word} `) : text.includes(word)));
}

/** The workers of a role in order. With `holds` those that were there stay in their places. */
function sorted(role, { by, order, ids }, holds) {
  const list = ofRole(role);
  if (order === "value") list.sort((a, b) => Number(isOut(a)) - Number(isOut(b)) || SCALES[by].of(b) - SCALES[by].of(a));
  if (holds && ids.has(role)) {
    const places = new Map(ids.get(role).map((id, place) => [id, place])), place = ({ id }) => places.get(id) ?? places.size;
    list.sort((a, b) => place(a) - place(b));
  }
  ids.set(role, list.map(({ id }) => id));
  return list;
}

function paint(view, legend, blocks, about) {
  const scale = SCALES[view.by];
  const cells = store.workers.length >= MIN_CELLS, holds = isPointed(blocks);
  // A table has the figures themselves.
  view.colours.hidden = !cells;
  legend.hidden = !cells;
  about.hidden = !cells;
  render(legend, view.by, () => [scale.names.map((name, level) => name && make("span", null, make(`i.f${level}`), name)), make("span", null, make("i.off"), "not eligible")]);
  if (!cells) {
    const why = new Map(notable().map((one) => [one.worker.id, one]));
    const rows = roles().flatMap((role) => sorted(role, view, holds)).filter((worker) => isMatch(worker, view.words)).map((worker) => workerRow(worker, why.get(worker.id)));
    put(blocks, make("div.flush", null, rows.length ? workerTable(rows) : make("p.quiet", null, store.workers.length ? "no worker matches" : NO_WORKER)));
    return;
  }
  for (const role of roles()) {
    let block = blocks.querySelector(`[data-block="${role}"]`);
    if (!block) {
      block = make("div.block", { "data-block": role }, make("div.head", null, make("h3", null, role), dim("")), board(role, view, about));
      blocks.append(block);
    }
    const list = sorted(role, view, holds), eligible = list.filter((worker) => !isOut(worker)).length;
    block.querySelector(".dim").textContent = `${number(eligible)} of ${number(list.length)} eligible`;
    const grid = block.querySelector(".cells");
    while (grid.children.length < list.length) grid.append(make("i"));
    while (grid.children.length > list.length) grid.lastChild.remove();
    list.forEach((worker, place) => {
      const cell = grid.children[place];
      const level = scale.bounds.filter((bound) => scale.of(worker) >= bound).length;
      const kind = `${isOut(worker) ? "off" : `f${level}`}${isMatch(worker, view.words) ? "" : " miss"}`;
      if (cell.dataset.id !== worker.id) cell.dataset.id = worker.id;
      if (cell.kind !== kind) {
        cell.kind = kind;
        cell.className = kind;
      }
    });
  }
  for (const block of [...blocks.children]) if (!roles().includes(block.dataset.block)) block.remove();
  const busiest = [...store.workers].sort((a, b) => b.share - a.share)[0];
  if (!store.byId.has(view.current)) view.current = busiest?.id ?? null;
  point(view, blocks, about);
}

/** The cells of a role. Arrow keys move among them, Enter opens one. */
function board(role, view, about) {
  const grid = make("div.cells", { tabindex: 0, role: "group", "aria-label": `${role} workers. Arrow keys move, Enter opens a worker.`, "aria-describedby": "about" });
  const go = (id) => {
    view.current = id;
    point(view, grid.closest(".blocks"), about);
    // A screen reader reads the figures of the worker that was gone to, and not each change of them.
    setText(view.spoken, about.textContent);
  };
  grid.addEventListener("pointerover", ({ target }) => target.dataset.id && go(target.dataset.id));
  grid.addEventListener("click", ({ target }) => target.dataset.id && (location.hash = `#worker/${target.dataset.id}`));
  grid.addEventListener("focus", () => store.byId.get(view.current)?.role === role || go(grid.firstChild.dataset.id));
  grid.addEventListener("keydown", (event) => {
    const cells = [...grid.children], at = cells.findIndex((cell) => cell.dataset.id === view.current);
    if (event.key === "Enter" && at >= 0) return void (location.hash = `#worker/${view.current}`);
    const wide = cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide, Home: -at, End: cells.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    if (cells[at + step]) go(cells[at + step].dataset.id);
  });
  return grid;
}

function point(view, blocks, about) {
  for (const cell of blocks.querySelectorAll(".current")) cell.classList.remove("current");
  const worker = store.byId.get(view.current);
  if (!worker) return;
  for (const cell of blocks.querySelectorAll(".cells > i")) if (cell.dataset.id === worker.id) cell.classList.add("current");
  render(about, worker, () => [link(`#worker/${worker.id}`, make("b", null, nameOf(worker.id))), dim(whereOf(worker)), dim(urlOf(worker)), make("span", null, isOut(worker) ? outText(worker) : "eligible", worker.reason ? `: ${worker.reason}` : ""), Object.values(SCALES).map(({ text }) => make("span", null, text(worker)))]);
}
