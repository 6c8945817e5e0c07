// Types of pointsman-policy.js, the helper for routing policies.
import type { RequestFacts, WorkerFacts } from "pointsman:policy/facts";
import type { RouterConfigOverride } from "pointsman:policy/disaggregation@0.1.1";
import type { Call, Leg } from "pointsman:policy/types@0.1.1";

export type { Call, Leg, RequestFacts, RouterConfigOverride, WorkerFacts };

declare global {
  /** Writes to the policy's log. */
  interface Console {
    debug(...values: unknown[]): void;
    log(...values: unknown[]): void;
    info(...values: unknown[]): void;
    warn(...values: unknown[]): void;
    error(...values: unknown[]): void;
  }
  var console: Console;
}

type RequestFact = keyof RequestFacts;
type WorkerFact = keyof WorkerFacts;
type Settings = Record<string, unknown>;
type Costs = ArrayLike<number>;

/** The facts that a policy asks for: numbers of the request, and an array with one value for each row. Others are a type error. */
export type Facts<R extends RequestFact = never, W extends WorkerFact = never> = { readonly rows: number } & {
  readonly [N in R]: RequestFacts[N];
} & { readonly [N in W]: WorkerFacts[N] };

interface Rule<R extends RequestFact, W extends WorkerFact, S extends Settings> {
  /** Name of the policy, in lower case. */
  name: string;
  version?: string;
  requestFacts?: readonly R[];
  workerFacts?: readonly W[];
  /** The operator's settings with their defaults. Unknown names are refused when the policy is loaded. */
  settings?: S;
  /**
   * Throws an Error when the settings are invalid. It may set `this.requestFacts` and `this.workerFacts`, which are read after it.
   * Give the lists a type with all names that it may set: `workerFacts: [] as (keyof WorkerFacts)[]`.
   */
  configure?(settings: S): void;
}

/** What the component exports. */
export interface Exported {
  readonly [name: string]: unknown;
}

export interface Choice {
  row: number;
  costs?: Costs;
  /** Explanation for the receipt. */
  reason?: string;
}

export function selector<R extends RequestFact = never, W extends WorkerFact = never, S extends Settings = {}>(
  rule: Rule<R, W, S> & { select(call: Call, facts: Facts<R, W>): number | Choice | null },
): { readonly policy: Exported; readonly selecting: Exported };

export function scorer<R extends RequestFact = never, W extends WorkerFact = never, S extends Settings = {}>(
  rule: Rule<R, W, S> & { score(call: Call, facts: Facts<R, W>): Costs },
): { readonly policy: Exported; readonly scoring: Exported };

export function filter<R extends RequestFact = never, W extends WorkerFact = never, S extends Settings = {}>(
  rule: Rule<R, W, S> & { keep(call: Call, facts: Facts<R, W>): ArrayLike<number> },
): { readonly policy: Exported; readonly filtering: Exported };

export function decodeOverride<R extends RequestFact = never, W extends WorkerFact = never, S extends Settings = {}>(
  rule: Rule<R, W, S> & {
    decide(call: Call, decode: Facts<R, W>, prefill: Facts<R, W>): "remote" | "local";
    decodeConfig?(call: Call, facts: Facts<R>): RouterConfigOverride;
  },
): { readonly policy: Exported; readonly disaggregation: Exported };

/** Returns the row of the lowest cost. Ties are drawn uniformly. null: there is no row, or every cost is NaN. */
export function least(costs: Costs, seed: bigint): number | null;

/** SplitMix64. Seed it with `call.seed`, the only source of randomness. */
export class Rng {
  constructor(seed: bigint);
  /** Returns 64 uniform bits. */
  bits(): bigint;
  /** Returns a uniform number from 0 up to, but not including, 1. */
  unit(): number;
  /** Returns a uniform number from 0 up to, but not including, `bound`; 0 when `bound` is 0. */
  below(bound: number): number;
}

/** Throw this to refuse the request, with a message for the client. */
export class Shed {
  constructor(status: 429 | 503 | 529, reason: string);
}

/**
 * For unit tests in Node: `register(stateForTests)`, with `register` of `node:module`, puts a map without limits and without expiry
 * in the place of `pointsman:policy/state`. Then import the policy: `await import("./policy.js")`.
 */
export const stateForTests: string;

/** Configures a policy and calls it once, in Node. */
export function ask(
  exports: Exported,
  question?: {
    settings?: Settings;
    rows?: Record<string, number | bigint>[];
    request?: Record<string, number | bigint>;
    decode?: Record<string, number | bigint>;
    leg?: Leg;
    attempt?: number;
    seed?: number | bigint;
    nowUs?: bigint;
  },
): unknown;
