// Helper for Pointsman routing policies in JavaScript.
//
// `selector`, `scorer`, `filter` and `decodeOverride` take an object and return the exports of the component. The object has `name`,
// `version`, `requestFacts`, `workerFacts`, `settings` (the known settings with their defaults; an unknown one is an error),
// `configure(settings)`, which throws an Error when they are invalid, and the function of the world.
//
// A candidate is a row, numbered from 0. `call` has `leg`, `attempt`, `rows`, `seed` (a BigInt, for `Rng`) and `nowUs`
// (microseconds since the Unix epoch). `facts["n"]` is a number of the request; `facts["engine-queue"]` is an array with one value
// for each row. The build copies this file beside the policy. See policies/js/least-loaded/policy.js for a complete example.

// Facts that are not one u32. wit/facts.md lists all facts; a test compares these sets with it.
const U64 = new Set(["session-hash", "lora-hash", "tenant-hash", "other-leg-worker-id", "worker-id"]);
const F32 = new Set([
  "priority", "priority-jump-s", "overlap-score-credit", "host-cache-credit", "disk-cache-credit",
  "prefill-load-scale", "active-request-weight", "temperature", "shared-cache-multiplier", "kv-usage",
  "taint-preference",
]);

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

  /** Returns a uniform number from 0 up to, but not including, `bound`; 0 when `bound` is 0. */
  below(bound) {
    return Number((this.bits() * BigInt(bound)) >> 64n);
  }
}

/** Throw this to refuse the request, with status 429, 503 or 529 and a message for the client. */
export class Shed {
  constructor(status, reason) {
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
  const { policy, columns } = baseExports(rule);
  const select = (call, words) =>
    guarded(() => {
      const chosen = rule.select(call, columns(words, call.rows));
      if (chosen === null || chosen === undefined) return { tag: "abstain" };
      const { row, costs = [], reason } = typeof chosen === "number" ? { row: chosen } : chosen;
      return { tag: "choose", val: { row, costs: costs instanceof Float32Array ? costs : Float32Array.from(costs), reason } };
    }, (shed) => ({ tag: "shed", val: shed }));
  return { policy, selecting: { select } };
}

/** World `scorer`: `score(call, facts)` returns one finite cost for each row, lower is better. */
export function scorer(rule) {
  const { policy, columns } = baseExports(rule);
  const score = (call, words) => guarded(() => Float32Array.from(rule.score(call, columns(words, call.rows))));
  return { policy, scoring: { score } };
}

/** World `filter`: `keep(call, facts)` returns the rows to keep, in rising order. */
export function filter(rule) {
  const { policy, columns } = baseExports(rule);
  const keep = (call, words) => guarded(() => Uint32Array.from(rule.keep(call, columns(words, call.rows))));
  return { policy, filtering: { keep } };
}

/**
 * World `decode-override`: `decide(call, decode, prefill)` returns "remote" or "local"; `decodeConfig(call, facts)` returns the
 * router settings to replace for the decode leg.
 */
export function decodeOverride(rule) {
  const { policy } = baseExports(rule);
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

function baseExports(rule) {
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

/** Turns exceptions into errors of the contract. One that left the guest would destroy the instance. */
function guarded(answer, shed) {
  try {
    return answer();
  } catch (problem) {
    if (problem instanceof Shed && shed) return shed({ status: problem.status, reason: problem.reason });
    throw { tag: "internal", val: problem instanceof Error ? problem.message : String(problem?.reason ?? problem) };
  }
}
