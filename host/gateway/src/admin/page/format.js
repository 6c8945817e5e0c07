// Numbers, times and names as the page shows them.

const NONE = "–";
const isNone = (value) => value === null || value === undefined || Number.isNaN(value);

/** A number with a fixed count of digits after the point. */
export const number = (value, digits = 0) =>
  isNone(value) ? NONE : Number(value).toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

/** Between a figure and its unit: a line does not break there. */
const NBSP = "\u00a0";

/** A time in milliseconds as its figure and its unit. */
export function timeParts(value) {
  if (isNone(value)) return [NONE, ""];
  if (value >= 9_995) return [number(value / 1e3, 1), "s"];
  if (value >= 999.5) return [number(value / 1e3, 2), "s"];
  if (value >= 20) return [number(value), "ms"];
  return value >= 1 || value === 0 ? [number(value, value === 0 ? 0 : 1), "ms"] : [number(value * 1e3), "µs"];
}

export const millis = (value) => timeParts(value).filter(Boolean).join(NBSP);
export const micros = (value) => (isNone(value) ? NONE : millis(value / 1e3));

/** A share in per cent. */
export function percent(share, digits = 0) {
  if (isNone(share)) return NONE;
  const scale = 10 ** digits;
  const exact = Math.round(share * 100 * scale) / scale;
  // What is not all is not shown as 100 %.
  return `${number(exact === 100 && share < 1 ? 100 - 1 / scale : exact, exact === 0 || (exact === 100 && share >= 1) ? 0 : digits)}${NBSP}%`;
}

/** A factor, as in "9.6×". */
export const times = (value) => (isNone(value) ? NONE : `${number(value, value < 10 ? 1 : 0)}×`);

export const clock = (at) => new Date(at).toLocaleTimeString("en-GB");
export const minute = (at) => clock(at).slice(0, 5);

/** How long ago something was. */
export function age(ms) {
  if (ms < 90e3) return `${number(ms / 1e3)} s`;
  if (ms < 90 * 60e3) return `${number(ms / 60e3)} min`;
  return ms < 48 * 3600e3 ? `${number(ms / 3600e3)} h` : `${number(ms / 86400e3)} days`;
}

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const shortId = (id) => (String(id).length > 10 ? `${String(id).slice(0, 8)}…` : String(id));
export const digest = (text) => (text ? String(text).slice(0, 8) : "");
export const address = (url) => String(url).replace(/^https?:\/\//, "").replace(/\/+$/, "");

/** Characters of a worker's name: longer ones would push other columns away, and shorter ones say too little. */
const [MIN_NAME, MAX_NAME] = [6, 24];

/** The length of what all texts end with, cut at the beginning of a label; 0 when it would be all of one. */
function commonEnd(texts) {
  const [first] = texts;
  let same = 0;
  while (same < first.length && texts.every((text) => text.at(-1 - same) === first.at(-1 - same))) same += 1;
  const label = first.slice(first.length - same).search(/[.:/]/);
  const end = label < 0 ? 0 : same - label;
  return texts.length > 1 && texts.every((text) => text.length > end) ? end : 0;
}

/** The length of what all texts begin with, up to the end of a label; 0 for a single one. */
function commonStart(texts) {
  const [first] = texts, most = Math.min(...texts.map(({ length }) => length)) - MIN_NAME;
  let same = 0;
  while (same < most && texts.every((text) => text[same] === first[same])) same += 1;
  return texts.length > 1 ? first.slice(0, same).search(/[.:/][^.:/]*$/) + 1 : 0;
}

/** Cuts a text in the middle: the ends tell workers apart. */
function shortened(text) {
  const half = (MAX_NAME - 1) / 2;
  return text.length > MAX_NAME ? `${text.slice(0, Math.ceil(half))}…${text.slice(-Math.floor(half))}` : text;
}

/** Names for long addresses, by id: without what all of them, or all of their role, end and begin with, else cut in the middle. */
function shortNames(workers) {
  const long = workers.filter(({ url }) => address(url).length > MAX_NAME), roles = new Set(long.map(({ role }) => role));
  const cut = (some) => {
    if (!some.length) return [];
    const all = some.map(({ url }) => address(url)), end = commonEnd(all), texts = all.map((text) => text.slice(0, text.length - end));
    const start = texts.some((text) => text.length > MAX_NAME) ? commonStart(texts) : 0;
    return some.map(({ id }, place) => [id, shortened(texts[place].slice(start))]);
  };
  const of_all = cut(long), of_role = [...roles].flatMap((role) => cut(long.filter((worker) => worker.role === role)));
  const isWhole = (names) => names.every(([, name]) => !name.includes("…")), isUnique = (names) => new Set(names.map(([, name]) => name)).size === names.length;
  return new Map([of_all, of_role].find((names) => isWhole(names) && isUnique(names)) ?? [of_role, of_all].find(isUnique) ?? of_all);
}

/** Returns names of workers by id: a short id, else the address, which is shortened, else the beginning of the id. */
export function names(workers) {
  const hashed = workers.filter(({ id }) => id.length > 10), short = shortNames(hashed);
  const text = ({ id, url }) => short.get(id) ?? address(url);
  const uses = new Map();
  for (const worker of hashed) uses.set(text(worker), (uses.get(text(worker)) ?? 0) + 1);
  const name = (worker) => (worker.id.length <= 10 || uses.get(text(worker)) > 1 ? shortId(worker.id) : text(worker));
  return new Map(workers.map((worker) => [worker.id, name(worker)]));
}

/** Parses JSON; whole numbers that a double cannot hold (ids have 64 bits) become text. */
export function parse(text) {
  const exact = (_, value, context) =>
    typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER && context?.source ? context.source : value;
  return JSON.parse(text, exact);
}
