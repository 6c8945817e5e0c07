// Selector: the least loaded worker. Ties are drawn uniformly. Same rule and test cases as policies/least-loaded.

import { least, selector } from "./pointsman-policy.js";

let weights;

export const { policy, selecting } = selector({
  name: "least-loaded",
  requestFacts: ["explain"],
  workerFacts: ["active-requests", "active-prefill-tokens", "engine-queue", "engine-queue-known"],
  settings: { "active-requests": 1, "prefill-kilotokens": 0, "engine-queue": 0 },

  configure(settings) {
    for (const [key, weight] of Object.entries(settings)) {
      if (!(Number.isFinite(weight) && weight >= 0)) {
        throw new Error(`${key}: ${weight} is not a finite number of 0 or more`);
      }
    }
    weights = [settings["active-requests"], settings["prefill-kilotokens"] / 1000, settings["engine-queue"]];
  },

  select(call, facts) {
    const [a, b, c] = weights;
    const requests = facts["active-requests"], tokens = facts["active-prefill-tokens"], queue = facts["engine-queue"];
    const known = facts["engine-queue-known"];
    const told = queue.filter((_, row) => known[row]);
    // A queue that the engine does not tell counts as the mean of the others.
    const mean = told.length ? told.reduce((sum, waiting) => sum + waiting, 0) / told.length : 0;
    const costs = new Float32Array(call.rows);
    for (let row = 0; row < call.rows; row += 1) {
      costs[row] = a * requests[row] + b * tokens[row] + c * (known[row] ? queue[row] : mean);
    }
    const row = least(costs, call.seed);
    return row === null ? null : { row, costs: facts.explain ? costs : [] };
  },
});
