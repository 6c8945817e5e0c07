// Write a Pointsman routing policy in JavaScript: facts by name instead of one flat list of numbers.
//
// `selector`, `scorer`, `filter` and `decodeOverride` take an object: `name`, `version`, `requestFacts`, `workerFacts`,
// `settings` (the known ones with their defaults; others are refused), `configure(settings)`, and the function of the world.
// They answer the exports of the component. This file is copied beside the policy; it needs nothing else.

// Facts that are not one u32. wit/facts.md has all of them; a test of the house holds these lists against it.
const U64 = new Set(["session-hash", "lora-hash", "tenant-hash", "other-leg-worker-id", "worker-id"]);
const F32 = new Set([
  "priority", "priority-jump-s", "overlap-score-credit", "host-cache-credit", "disk-cache-credit",
  "prefill-load-scale", "active-request-weight", "temperature", "shared-cache-multiplier", "kv-usage",
  "taint-preference",
]);

const MASK = (1n << 64n) - 1n;

/** SplitMix64 from the call's seed, the only randomness there is. The Rust SDK draws the same numbers. */
export class Rng {
  #state;

  constructor(seed) {
    this.#state = seed;
  }

  bits() {
    this.#state = (this.#state + 0x9e3779b97f4a7c15n) & MASK;
    let mixed = ((this.#state ^ (this.#state >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
    mixed = ((mixed ^ (mixed >> 27n)) * 0x94d049bb133111ebn) & MASK;
    return mixed ^ (mixed >> 31n);
  }

  below(bound) {
    return Number((this.bits() * BigInt(bound)) >> 64n);
  }
}

/** Throw it to refuse the request: 429, 503 or 529, and a text for the client. */
export class Shed {
  constructor(status, reason) {
    this.status = status;
    this.reason = reason;
  }
}

/** The row of the least cost, ties uniform; null when there is no row. */
export function least(costs, seed) {
  // One pass, by index: without a JIT an iterator costs more than the rule.
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

/** World `selector`: `select(call, facts)` answers a row, `{ row, costs, reason }`, or null to abstain. */
export function selector(rule) {
  const { policy, columns } = introduce(rule);
  const select = (call, words) =>
    guarded(() => {
      const chosen = rule.select(call, columns(words, call.rows));
      if (chosen === null || chosen === undefined) return { tag: "abstain" };
      const { row, costs = [], reason } = typeof chosen === "number" ? { row: chosen } : chosen;
      return { tag: "choose", val: { row, costs: costs instanceof Float32Array ? costs : Float32Array.from(costs), reason } };
    }, (shed) => ({ tag: "shed", val: shed }));
  return { policy, selecting: { select } };
}

/** World `scorer`: `score(call, facts)` answers one cost a row. */
export function scorer(rule) {
  const { policy, columns } = introduce(rule);
  const score = (call, words) => guarded(() => Float32Array.from(rule.score(call, columns(words, call.rows))));
  return { policy, scoring: { score } };
}

/** World `filter`: `keep(call, facts)` answers the rows that stay, rising. */
export function filter(rule) {
  const { policy, columns } = introduce(rule);
  const keep = (call, words) => guarded(() => Uint32Array.from(rule.keep(call, columns(words, call.rows))));
  return { policy, filtering: { keep } };
}

/** World `decode-override`: `decide(call, decode, prefill)` answers "remote" or "local"; `decodeConfig(call, facts)` an override. */
export function decodeOverride(rule) {
  const { policy } = introduce(rule);
  const { requestFacts = [], workerFacts = [] } = rule;
  const decide = (call, request, decode, prefill) =>
    guarded(() => {
      const one = named(requestFacts, decode.length ? workerFacts : [], request, decode, 1);
      const many = named(requestFacts, prefill.length ? workerFacts : [], request, prefill, call.rows);
      return { tag: rule.decide(call, one, many) === "local" ? "local" : "remote" };
    }, (shed) => ({ tag: "shed", val: shed }));
  const decodeConfig = (call, words) =>
    guarded(() => rule.decodeConfig(call, named(requestFacts, [], words, new Uint32Array(), 0)));
  return { policy, disaggregation: { decide, decodeConfig } };
}

function introduce(rule) {
  const { requestFacts = [], workerFacts = [], settings: defaults = {} } = rule;
  const split = requestFacts.reduce((width, name) => width + widthOf(name), 0);
  const policy = {
    describe: () => ({ name: rule.name, version: rule.version ?? "0.1.0" }),
    configure(text) {
      try {
        const given = JSON.parse(text || "{}");
        const unknown = Object.keys(given).find((key) => !(key in defaults));
        if (unknown !== undefined) throw new Error(`settings: unknown field \`${unknown}\``);
        rule.configure?.({ ...defaults, ...given });
      } catch (problem) {
        throw problem instanceof Error ? problem.message : String(problem);
      }
      return { requestFacts, workerFacts };
    },
  };
  const columns = (words, rows) =>
    named(requestFacts, workerFacts, words.subarray(0, split), words.subarray(split), rows);
  return { policy, columns };
}

/** Request facts as numbers (BigInt when 64 bits wide), worker facts as arrays with one value a row. */
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
  return facts;
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

/** An exception that leaves the guest would cost its instance: all of them become the contract's error. */
function guarded(answer, shed) {
  try {
    return answer();
  } catch (problem) {
    if (problem instanceof Shed && shed) return shed({ status: problem.status, reason: problem.reason });
    throw { tag: "internal", val: problem instanceof Error ? problem.message : String(problem?.reason ?? problem) };
  }
}
