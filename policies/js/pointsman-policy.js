// Helper for Pointsman routing policies in JavaScript.
//
// `selector`, `scorer`, `filter` and `decodeOverride` take an object and return the exports of the component. The object has `name`,
// `version`, `requestFacts`, `workerFacts`, `settings` (the known settings with their defaults; an unknown one is an error),
// `configure(settings)`, which throws an Error when they are invalid, and the function of the world. `configure` may set
// `this.requestFacts` and `this.workerFacts`: which facts a policy asks for may depend on its settings.
//
// Another answer than the one of its world is an error, which counts as a failure of the policy; the slot's fallback then decides.
// `Math.random` starts anew from `call.seed` in each call, so that a decision can be replayed. `console.log` writes to the policy's
// log. There is no clock, file or network, and nothing to wait for: the functions of a policy are not async.
//
// This file also runs in Node without a component. `ask` calls a policy there with the same checks:
//
//   import assert from "node:assert";
//   import { ask } from "./pointsman-policy.js";
//   import * as leastLoaded from "./policy.js";
//
//   assert.deepEqual(ask(leastLoaded, { rows: [{ "active-requests": 3 }, { "active-requests": 0 }] }), { row: 1 });
//
// A candidate is a row, numbered from 0. `call` has `leg`, `attempt`, `rows`, `seed` (a BigInt, for `Rng`) and `nowUs`
// (microseconds since the Unix epoch). `facts["n"]` is a number of the request; `facts["engine-queue"]` is an array with one value
// for each row. The build copies this file beside the policy. `pointsman policy new` writes a complete example.

// All facts by type. Do not edit: each release writes its own. `pointsman policy facts` describes them.
const FACTS = {
  "request": {
    "u32": [
      "prompt-tokens", "prompt-tokens-estimated", "request-blocks", "block-size", "n", "max-tokens",
      "expected-output-tokens", "ttft-target-us", "itl-target-us", "tenant-active-requests",
      "assume-kv-reuse", "track-prefill-tokens", "other-leg-dp-rank", "explain", "queue-us",
      "program-turn", "program-idle-ms",
    ],
    "f32": [
      "priority", "priority-jump-s", "overlap-score-credit", "host-cache-credit", "disk-cache-credit",
      "prefill-load-scale", "active-request-weight", "temperature", "shared-cache-multiplier",
    ],
    "u64": [
      "session-hash", "lora-hash", "tenant-hash", "other-leg-worker-id", "program-hash",
    ],
  },
  "worker": {
    "u32": [
      "dp-rank", "active-requests", "active-prefill-tokens", "decode-blocks", "total-blocks",
      "cached-blocks-device", "cached-blocks-host", "cached-blocks-disk", "engine-running",
      "engine-queue", "load-age-ms", "topology-distance", "lora-loaded", "session-bound", "ttft-ewma-us",
      "itl-ewma-us", "error-ppm", "local-prefill", "max-concurrency", "prefill-us-per-ktoken",
      "engine-running-known", "engine-queue-known", "kv-usage-known", "program-tokens",
      "running-program-tokens", "prefix-requests", "label-is/<key>=<value>", "taint-is/<name>",
    ],
    "f32": [
      "kv-usage", "taint-preference", "label-number/<key>",
    ],
    "u64": [
      "worker-id",
    ],
  },
};
const U64 = new Set(Object.values(FACTS).flatMap(({ u64 }) => u64));
const F32 = new Set(Object.values(FACTS).flatMap(({ f32 }) => f32));
// Values of facts that a test may leave out: of an absent fact, or the gateway's default. Others are 0.
const LEFT_OUT = {
  n: 1, "block-size": 16, "overlap-score-credit": 1, "host-cache-credit": 0.75, "disk-cache-credit": 0.25, "prefill-load-scale": 1,
  "assume-kv-reuse": 1, "track-prefill-tokens": 1, "other-leg-dp-rank": 4294967295, "program-idle-ms": 4294967295,
  "engine-running-known": 1, "engine-queue-known": 1, "kv-usage-known": 1,
};

const MASK = (1n << 64n) - 1n;

/** SplitMix64. Seed it with `call.seed`, the only source of randomness. The Rust SDK draws the same numbers. */
export class Rng {
  #state;

  constructor(seed) {
    this.#state = seed;
  }

  /** Returns 64 uniform bits as a BigInt. */
  bits() {
    this.#state = (this.#state + 0x9e3779b97f4a7c15n) & MASK;
    let mixed = ((this.#state ^ (this.#state >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
    mixed = ((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn) & MASK;
    return mixed ^ (mixed >> 31n);
  }

  /** Returns a uniform number from 0 up to, but not including, 1. */
  unit() {
    return Number(this.bits() >> 11n) / 2 ** 53;
  }

  /** Returns a uniform number from 0 up to, but not including, `bound`; 0 when `bound` is 0. */
  below(bound) {
    return Number((this.bits() * BigInt(bound)) >> 64n);
  }
}

/** Throw this to refuse the request, with status 429, 503 or 529 and a message for the client. */
export class Shed {
  constructor(status, reason) {
    if (![429, 503, 529].includes(status)) throw new Error(`shed status ${status} is not allowed: use 429, 503 or 529`);
    this.status = status;
    this.reason = reason;
  }
}

/** Returns the row of the lowest cost. Ties are drawn uniformly. null: there is no row, or every cost is NaN. */
export function least(costs, seed) {
  // One pass with an index: without a JIT, an iterator costs more than the comparison.
  let lowest = Infinity;
  let rows = [];
  for (let row = 0; row < costs.length; row += 1) {
    const cost = costs[row];
    if (cost < lowest) {
      lowest = cost;
      rows = [row];
    } else if (cost === lowest) {
      rows.push(row);
    }
  }
  if (rows.length === 0) return null;
  return rows.length === 1 ? rows[0] : rows[new Rng(seed).below(rows.length)];
}

/** World `selector`: `select(call, facts)` returns a row, `{ row, costs, reason }`, or null to abstain. */
export function selector(rule) {
  const { policy, columns } = baseExports(rule, "select");
  const select = (call, words) =>
    guarded(call, () => {
      const chosen = answerOf(rule, "select", call, columns(words, call.rows));
      if (chosen === null) return { tag: "abstain" };
      if (typeof chosen !== "number" && !isTable(chosen)) {
        throw new Error(`select returned ${shown(chosen)}: expected a row, { row, costs, reason } or null`);
      }
      if (typeof chosen !== "number") known("select", chosen, ["row", "costs", "reason"]);
      const { row, costs = [], reason } = typeof chosen === "number" ? { row: chosen } : chosen;
      if (!Number.isInteger(row) || row < 0 || row >= call.rows) throw new Error(`select returned row ${shown(row)} of ${call.rows}`);
      if (reason !== undefined && typeof reason !== "string") throw new Error(`select returned the reason ${shown(reason)}: expected a text`);
      return { tag: "choose", val: { row, costs: costs.length ? finite("select", costs, call.rows) : new Float32Array(), reason } };
    }, (shed) => ({ tag: "shed", val: shed }));
  return { policy, selecting: { select } };
}

/** World `scorer`: `score(call, facts)` returns one finite cost for each row, lower is better. */
export function scorer(rule) {
  const { policy, columns } = baseExports(rule, "score");
  const score = (call, words) => guarded(call, () => finite("score", answerOf(rule, "score", call, columns(words, call.rows)), call.rows));
  return { policy, scoring: { score } };
}

/** World `filter`: `keep(call, facts)` returns the rows to keep, in rising order. */
export function filter(rule) {
  const { policy, columns } = baseExports(rule, "keep");
  const keep = (call, words) =>
    guarded(call, () => {
      const kept = answerOf(rule, "keep", call, columns(words, call.rows));
      if (!isList(kept)) throw new Error(`keep returned ${shown(kept)}: expected the rows to keep`);
      let last = -1;
      for (const row of kept) {
        if (!Number.isInteger(row) || row <= last || row >= call.rows) {
          throw new Error(`keep returned ${shown([...kept])}: expected rising rows below ${call.rows}`);
        }
        last = row;
      }
      return Uint32Array.from(kept);
    });
  return { policy, filtering: { keep } };
}

// Router settings that `decodeConfig` may replace, and their types.
const OVERRIDES = {
  overlapScoreCredit: "number", prefillLoadScale: "number", temperature: "number", assumeKvReuse: "boolean",
  trackPrefillTokens: "boolean", sharedCacheMultiplier: "number",
};

// Default of `decodeConfig`: the decode worker receives all blocks, whatever it has cached, and does not prefill.
const AFTER_REMOTE_PREFILL = { overlapScoreCredit: 0, assumeKvReuse: false, trackPrefillTokens: false };

/**
 * World `decode-override`: `decide(call, decode, prefill)` returns "remote" or "local"; `decodeConfig(call, facts)` returns the
 * router settings to replace for the decode leg; without it they are those for a decode worker that receives all blocks.
 */
export function decodeOverride(rule) {
  const { policy, asked } = baseExports(rule, "decide");
  const decide = (call, request, decode, prefill) =>
    guarded(call, () => {
      const { requestFacts, workerFacts } = asked;
      const one = named(requestFacts, workerFacts, request, decode, decode.length || !workerFacts.length ? 1 : 0);
      const many = named(requestFacts, workerFacts, request, prefill, call.rows);
      const plan = answerOf(rule, "decide", call, one, many);
      if (plan !== "remote" && plan !== "local") throw new Error(`decide returned ${shown(plan)}: expected "remote" or "local"`);
      return { tag: plan };
    }, (shed) => ({ tag: "shed", val: shed }));
  const decodeConfig = (call, words) =>
    guarded(call, () => {
      const over = rule.decodeConfig ? answerOf(rule, "decodeConfig", call, named(asked.requestFacts, [], words, new Uint32Array(), 0)) : AFTER_REMOTE_PREFILL;
      if (!isTable(over)) throw new Error(`decodeConfig returned ${shown(over)}: expected an object`);
      known("decodeConfig", over, Object.keys(OVERRIDES));
      for (const [key, value] of Object.entries(over)) {
        if (value !== undefined && typeof value !== OVERRIDES[key]) {
          throw new Error(`decodeConfig returned ${shown(value)} for \`${key}\`: expected a ${OVERRIDES[key]}`);
        }
      }
      return over;
    });
  return { policy, disaggregation: { decide, decodeConfig } };
}

/**
 * Configures a policy and calls it once, in Node. `exports` are those of its module; `rows` has an object of worker facts for each
 * candidate, `request` the request facts, `decode` the facts of the decode worker. Returns `{ row, costs, reason }`, "abstain",
 * `{ costs }`, `{ keep }`, `{ plan }` or `{ shed }`. Errors are thrown.
 */
export function ask(exports, { settings = {}, rows = [], request = {}, decode, leg = "prefill", attempt = 0, seed = 1n, nowUs = 0n } = {}) {
  const wants = told(() => exports.policy.configure(JSON.stringify(withHashes(settings))));
  // In a component the gateway refuses unknown facts; it may have newer ones.
  checkFacts("request", wants.requestFacts);
  checkFacts("worker", wants.workerFacts);
  const call = { leg, attempt, rows: rows.length, seed: BigInt(seed), nowUs };
  const requestWords = words(wants.requestFacts, [request], true);
  const worker = (list) => words(wants.workerFacts, list);
  const facts = () => Uint32Array.from([...requestWords, ...worker(rows)]);
  if (exports.selecting) {
    const { tag, val } = told(() => exports.selecting.select(call, facts()));
    if (tag === "abstain") return tag;
    if (tag === "shed") return { shed: val.status };
    const { row, costs, reason } = val;
    return { row, ...(costs.length ? { costs: [...costs] } : {}), ...(reason === undefined ? {} : { reason }) };
  }
  if (exports.scoring) return { costs: [...told(() => exports.scoring.score(call, facts()))] };
  if (exports.filtering) return { keep: [...told(() => exports.filtering.keep(call, facts()))] };
  const one = decode === undefined ? new Uint32Array() : worker([decode]);
  const plan = told(() => exports.disaggregation.decide(call, requestWords, one, worker(rows)));
  return plan.tag === "shed" ? { shed: plan.val.status } : { plan: plan.tag };
}

const STATE = `
  const kept = new Map();
  export const get = (key) => kept.get(key);
  export const set = (key, value) => void kept.set(key, Uint8Array.from(value));
  const remove = (key) => void kept.delete(key);
  export { remove as delete };
  export const increment = (key, delta) => {
    const value = kept.get(key) ?? new Uint8Array(8);
    if (value.length !== 8) throw "not-a-number";
    const sum = new DataView(value.buffer).getBigInt64(0, true) + BigInt(delta);
    const words = new BigInt64Array([sum > 2n ** 63n - 1n ? 2n ** 63n - 1n : sum < -(2n ** 63n) ? -(2n ** 63n) : sum]);
    kept.set(key, new Uint8Array(words.buffer));
    return words[0];
  };
`;
const moduleOf = (text) => `data:text/javascript,${encodeURIComponent(text)}`;

/**
 * For unit tests in Node: `register(stateForTests)`, with `register` of `node:module`, puts a map without limits and without expiry
 * in the place of `pointsman:policy/state`. Then import the policy: `await import("./policy.js")`.
 */
export const stateForTests = moduleOf(`
  export const resolve = (name, context, next) =>
    name.startsWith("pointsman:policy/state") ? { url: ${JSON.stringify(moduleOf(STATE))}, shortCircuit: true } : next(name, context);
`);

/** Refuses facts that no gateway has. */
function checkFacts(scope, asked) {
  const facts = Object.values(FACTS[scope]).flat();
  const unknown = asked.find((name) => !facts.some((fact) => isFact(name, fact)));
  if (unknown !== undefined) throw new Error(`${scope}Facts: unknown ${scope} fact \`${unknown}\`${suggestion(unknown, facts)}`);
}

/** Returns whether this is the name of a fact. That of a label or taint has parts in <>. */
function isFact(name, fact) {
  const [begin, ...rest] = fact.split("<");
  if (!rest.length) return name === fact;
  return name.length > begin.length && name.startsWith(begin) && (name.includes("=") || !fact.includes("="));
}

/** Turns an error of the contract into an Error. */
function told(answer) {
  try {
    return answer();
  } catch (problem) {
    if (problem instanceof Error) throw problem;
    throw new Error(typeof problem === "string" ? problem : problem.val);
  }
}

/** Returns the words of facts: those of a request, or columns. A fact that is asked for and not given has the value of `LEFT_OUT`,
 * otherwise 0. */
function words(names, rows, isRequest = false) {
  for (const name of rows.flatMap((row) => Object.keys(row))) {
    if (!names.includes(name)) throw new Error(`the policy does not ask for the ${isRequest ? "request" : "worker"} fact \`${name}\`${suggestion(name, names)}`);
  }
  const bits = new DataView(new ArrayBuffer(4));
  const low = (name, value) => {
    if (U64.has(name)) return Number(BigInt(value) & 0xffffffffn);
    if (!F32.has(name) && !name.startsWith("label-number/")) return value;
    bits.setFloat32(0, value);
    return bits.getUint32(0);
  };
  const column = (name) => {
    const values = rows.map((row) => hashed(row[name], name) ?? LEFT_OUT[name] ?? 0);
    const lows = values.map((value) => low(name, value));
    return U64.has(name) ? [...lows, ...values.map((value) => Number(BigInt(value) >> 32n))] : lows;
  };
  return Uint32Array.from(names.flatMap(column));
}

/** Returns the hash (FNV-1a) of the name that a test gives for a fact; `tenant:NAME` is that of the tenant NAME. */
function hashed(value, fact) {
  if (typeof value !== "string" || !fact.endsWith("-hash")) return value;
  const name = fact === "tenant-hash" && value.startsWith("tenant:") ? value.slice(7) : value;
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(name)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return hash;
}

/** Returns settings with hashes in the place of `tenant:NAME`, as the gateway passes them. */
function withHashes(settings) {
  if (typeof settings === "string") return settings.startsWith("tenant:") ? String(hashed(settings, "tenant-hash")) : settings;
  if (Array.isArray(settings)) return settings.map(withHashes);
  if (!isTable(settings)) return settings;
  return Object.fromEntries(Object.entries(settings).map(([key, value]) => [withHashes(key), withHashes(value)]));
}

const isTable = (value) => typeof value === "object" && value !== null && !isList(value);
const isList = (value) => Array.isArray(value) || ArrayBuffer.isView(value);
// JSON has no NaN.
const shown = (value) => (typeof value === "bigint" ? `${value}n` : typeof value === "number" ? String(value) : JSON.stringify(value) ?? String(value));

/** Calls a function of the rule. */
function answerOf(rule, method, ...args) {
  const answer = rule[method](...args);
  if (typeof answer?.then === "function") throw new Error(`${method} returned a Promise: ${method} must not be async`);
  return answer;
}

/** Refuses keys that an answer may not have. */
function known(method, answer, keys) {
  const unknown = Object.keys(answer).find((key) => !keys.includes(key));
  if (unknown !== undefined) throw new Error(`${method} returned the unknown key \`${unknown}\`${suggestion(unknown, keys)}`);
}

/** Returns costs as the contract has them. */
function finite(method, costs, rows) {
  if (!isList(costs)) throw new Error(`${method} returned ${shown(costs)}: expected one cost for each row`);
  if (costs.length !== rows) throw new Error(`${method} returned ${costs.length} costs for ${rows} rows`);
  for (let row = 0; row < rows; row += 1) {
    if (typeof costs[row] !== "number" || !Number.isFinite(Math.fround(costs[row]))) {
      throw new Error(`${method} returned the cost ${String(costs[row])} in row ${row}: expected a finite number of 32 bits`);
    }
  }
  return costs instanceof Float32Array ? costs : Float32Array.from(costs);
}

/** Returns the known name that was probably meant, as a question, or nothing. */
function suggestion(name, names) {
  const distance = (a, b) => {
    let line = Array.from({ length: b.length + 1 }, (_, at) => at);
    for (let i = 1; i <= a.length; i += 1) {
      const next = [i];
      for (let j = 1; j <= b.length; j += 1) {
        next.push(Math.min(next[j - 1] + 1, line[j] + 1, line[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
      }
      line = next;
    }
    return line[b.length];
  };
  const [best] = names.map((other) => [distance(name, other), other]).sort(([a], [b]) => a - b);
  return best !== undefined && best[0] <= Math.max(2, name.length / 4) ? `: did you mean \`${best[1]}\`?` : "";
}

const RULE_KEYS = ["name", "version", "requestFacts", "workerFacts", "settings", "configure"];

function baseExports(rule, method) {
  if (typeof rule[method] !== "function") throw new Error(`the policy has no function \`${method}\``);
  known("the policy", rule, [...RULE_KEYS, method, ...(method === "decide" ? ["decodeConfig"] : [])]);
  const { settings: defaults = {} } = rule;
  const asked = {};
  const readFacts = () => {
    const { requestFacts = [], workerFacts = [] } = rule;
    for (const [key, names] of Object.entries({ requestFacts, workerFacts })) {
      if (!Array.isArray(names) || !names.every((name) => typeof name === "string")) {
        throw new Error(`${key} is ${shown(names)}: expected an array of names`);
      }
    }
    const split = requestFacts.reduce((width, name) => width + widthOf(name), 0);
    Object.assign(asked, { requestFacts, workerFacts, split });
  };
  readFacts();
  const policy = {
    describe: () => ({ name: rule.name, version: rule.version ?? "0.1.0" }),
    configure(text) {
      if (log) confine();
      try {
        const given = JSON.parse(text || "{}");
        const names = Object.keys(defaults);
        const unknown = Object.keys(given).find((key) => !names.includes(key));
        if (unknown !== undefined) throw new Error(`settings: unknown field \`${unknown}\`${suggestion(unknown, names)}`);
        for (const [key, value] of Object.entries(given)) {
          const wanted = typeof defaults[key];
          if (defaults[key] !== null && typeof value !== wanted) {
            throw new Error(`settings: \`${key}\` is ${shown(value)}: expected a ${wanted}`);
          }
        }
        if (rule.configure) answerOf(rule, "configure", { ...defaults, ...given });
        readFacts();
      } catch (problem) {
        throw problem instanceof Error ? problem.message : String(problem);
      }
      return { requestFacts: asked.requestFacts, workerFacts: asked.workerFacts };
    },
  };
  const columns = (words, rows) =>
    named(asked.requestFacts, asked.workerFacts, words.subarray(0, asked.split), words.subarray(asked.split), rows);
  return { policy, columns, asked };
}

/** Names a fact that a policy reads without asking for it; its value would be `undefined`. */
const CHECKED = {
  get(facts, name) {
    // A log line of the facts asks for `toJSON`.
    if (name in facts || typeof name === "symbol" || name === "toJSON") return facts[name];
    throw new Error(`the policy does not ask for the fact \`${name}\`${suggestion(name, Object.keys(facts))}`);
  },
};

/** Returns request facts as numbers (BigInt when 64 bits wide), and worker facts as arrays with one value for each row. */
function named(requestFacts, workerFacts, request, matrix, rows) {
  const facts = { rows };
  let place = 0;
  for (const name of requestFacts) {
    facts[name] = decode(name, request.subarray(place, place + widthOf(name)), 1)[0];
    place += widthOf(name);
  }
  place = 0;
  for (const name of workerFacts) {
    const end = place + widthOf(name) * rows;
    facts[name] = decode(name, matrix.subarray(place, end), rows);
    place = end;
  }
  return new Proxy(facts, CHECKED);
}

function decode(name, words, rows) {
  if (U64.has(name)) {
    return BigUint64Array.from({ length: rows }, (_, row) => BigInt(words[row]) | (BigInt(words[rows + row]) << 32n));
  }
  if (F32.has(name) || name.startsWith("label-number/")) {
    return new Float32Array(words.buffer, words.byteOffset, words.length);
  }
  return words;
}

function widthOf(name) {
  return U64.has(name) ? 2 : 1;
}

/** Turns exceptions into errors of the contract, with their place. One that left the guest would destroy the instance. */
function guarded(call, answer, shed) {
  let rng;
  Math.random = () => (rng ??= new Rng(BigInt(call.seed))).unit();
  try {
    return answer();
  } catch (problem) {
    if (problem instanceof Shed && shed) return shed({ status: problem.status, reason: problem.reason });
    if (problem instanceof Shed) throw { tag: "internal", val: "only selectors and decode overrides may shed" };
    throw { tag: "internal", val: problem instanceof Error ? `${problem.name}: ${problem.message}${placeOf(problem)}` : String(problem) };
  }
}

/** Returns where an error was thrown, when that was in the policy and not in this file. */
function placeOf(problem) {
  const lines = String(problem.stack ?? "").split("\n").filter((line) => /:\d+:\d+\)?$/.test(line));
  // componentize-js makes initializer.js.
  const own = lines.find((line) => !/pointsman-policy\.js|initializer\.js/.test(line));
  const place = own?.match(/([^/\s(@]+:\d+:\d+)\)?$/);
  return place ? ` (${place[1]})` : "";
}

// The function of the contract that writes a line to the policy's log; only in a component.
let log;

/** The build of a component adds a call of this. */
function inComponent(write) {
  log = write;
}

// Levels of the console's functions in the log; others have "info".
const LEVELS = { debug: "debug", trace: "debug", warn: "warn", error: "error", assert: "error" };
const NO_CLOCK = "a policy has no clock: use call.nowUs";
const NO_WAIT = "a policy cannot wait: answer at once";
const NO_NETWORK = "a policy has no network: put the values into its settings";
const NO_ENTROPY = "a policy has no other randomness than its seed: use Math.random, or new Rng(call.seed)";

/** Sends the console to the policy's log, and replaces what a component lacks: it would trap, and not say why. */
function confine() {
  const plain = (_, value) =>
    typeof value === "bigint" ? String(value) : ArrayBuffer.isView(value) ? [...value] : value;
  const text = (value) => {
    if (typeof value === "string" || value instanceof Error) return String(value);
    if (typeof value !== "object") return shown(value);
    try {
      return JSON.stringify(value, plain);
    } catch {
      return Object.prototype.toString.call(value);
    }
  };
  for (const name of Object.keys(console)) {
    console[name] = (...values) => {
      if (name !== "assert" || !values.shift()) log(LEVELS[name] ?? "info", values.map(text).join(" "));
    };
  }
  const absent = (name, advice) => () => {
    throw new Error(`${name}(): ${advice}`);
  };
  const replace = (place, prefix, names, advice) => names.forEach((name) => (place[name] = absent(prefix + name, advice)));
  replace(globalThis, "", ["setTimeout", "setInterval"], NO_WAIT);
  replace(globalThis, "", ["fetch"], NO_NETWORK);
  replace(performance, "performance.", ["now"], NO_CLOCK);
  replace(crypto, "crypto.", ["getRandomValues", "randomUUID"], NO_ENTROPY);
  replace(Date, "Date.", ["now"], NO_CLOCK);
  globalThis.Date = new Proxy(Date, {
    apply: absent("Date", NO_CLOCK),
    construct: (date, given, target) =>
      given.length ? Reflect.construct(date, given, target) : absent("new Date", NO_CLOCK)(),
  });
}
