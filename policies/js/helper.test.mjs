// Tests of pointsman-policy.js in Node: `node --test policies/js/helper.test.mjs`.
import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync, copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { register } from "node:module";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

import { Shed, ask, decodeOverride, filter, scorer, selector, stateForTests } from "./pointsman-policy.js";

const facts = { name: "x", workerFacts: ["engine-queue"], settings: { weight: 1 } };
const rows = [{}, {}];
const worlds = {
  select: (answer) => selector({ ...facts, select: () => answer }),
  score: (answer) => scorer({ ...facts, score: () => answer }),
  keep: (answer) => filter({ ...facts, keep: () => answer }),
  decide: (answer) => decodeOverride({ ...facts, decide: () => answer }),
};
const refused = (world, answer, text) => assert.throws(() => ask(worlds[world](answer), { rows }), (error) => {
  assert.ok(error.message.includes(text), `${error.message}: expected ${text}`);
  return true;
});

test("a bad answer is an error and never a guess", () => {
  refused("decide", "Remote", 'decide returned "Remote": expected "remote" or "local"');
  refused("decide", undefined, 'decide returned undefined: expected "remote" or "local"');
  refused("select", "1", 'select returned "1": expected a row');
  refused("select", undefined, "select returned undefined");
  refused("select", { rows: 1 }, "select returned the unknown key `rows`: did you mean `row`?");
  refused("select", 2, "select returned row 2 of 2");
  refused("select", NaN, "select returned row NaN of 2");
  for (const world of Object.keys(worlds)) refused(world, Promise.resolve(0), `${world} returned a Promise: ${world} must not be async`);
  refused("score", null, "score returned null: expected one cost for each row");
  refused("score", [1, NaN], "the cost NaN in row 1");
  // T4.11
  refused("score", [1, Number.MAX_VALUE], "the cost 1.7976931348623157e+308 in row 1: expected a finite number of 32 bits");
  refused("keep", undefined, "keep returned undefined");
  refused("keep", [1, 0], "expected rising rows below 2");
  const config = (over) => decodeOverride({ ...facts, decide: () => "local", decodeConfig: () => over });
  const decodeConfig = (over) => config(over).disaggregation.decodeConfig({ seed: 1n }, new Uint32Array());
  assert.throws(() => decodeConfig({ overlapScoreCredits: 1 }), (error) => error.val.includes("did you mean `overlapScoreCredit`?"));
  assert.throws(() => decodeConfig(null), (error) => error.val.includes("decodeConfig returned null: expected an object"));
  assert.throws(() => new Shed(418, "teapot"), /shed status 418 is not allowed: use 429, 503 or 529/);
});

test("good answers pass", () => {
  assert.deepEqual(ask(worlds.select(1), { rows }), { row: 1 });
  assert.deepEqual(ask(worlds.select({ row: 0, costs: [1, 2], reason: "why" }), { rows }), { row: 0, costs: [1, 2], reason: "why" });
  assert.equal(ask(worlds.select(null), { rows }), "abstain");
  assert.deepEqual(ask(worlds.score([1, 0.5]), { rows }), { costs: [1, 0.5] });
  assert.deepEqual(ask(worlds.keep([0, 1]), { rows }), { keep: [0, 1] });
  assert.deepEqual(ask(worlds.decide("local"), { rows, decode: {} }), { plan: "local" });
  const plain = decodeOverride({ ...facts, decide: () => "local" });
  // D2.1: a policy without `decodeConfig` keeps the default.
  const config = plain.disaggregation.decodeConfig({ seed: 1n }, new Uint32Array());
  assert.deepEqual(config, { overlapScoreCredit: 0, assumeKvReuse: false, trackPrefillTokens: false });
});

test("unknown names get a suggestion", () => {
  assert.throws(() => ask(worlds.score([0, 0]), { rows, settings: { wieght: 2 } }), /unknown field `wieght`: did you mean `weight`\?/);
  assert.throws(() => ask(worlds.score([0, 0]), { rows, settings: { weight: "2" } }), /`weight` is "2": expected a number/);
  assert.throws(() => ask(worlds.score([0]), { rows: [{ "engine-queu": 1 }] }), /does not ask for the worker fact `engine-queu`: did you mean `engine-queue`\?/);
  assert.throws(() => selector({ ...facts, selekt: () => 0 }), /the policy has no function `select`/);
  const reads = scorer({ ...facts, score: (call, given) => given["engine-queues"] });
  assert.throws(() => ask(reads, { rows }), /does not ask for the fact `engine-queues`: did you mean `engine-queue`\? \(helper.test.mjs:\d+:\d+\)/);
});

test("a policy asks for an array of facts that exist", () => {
  const asking = (wants) => selector({ ...facts, ...wants, select: () => 0 });
  const labels = ["label-is/zone=a", "label-number/price", "taint-is/spot"];
  assert.deepEqual(ask(asking({ requestFacts: ["n"], workerFacts: labels }), { rows: [{}] }), { row: 0 });
  for (const [wants, text] of [
    [{ workerFacts: ["engine-que"] }, "unknown worker fact `engine-que`: did you mean `engine-queue`?"],
    [{ workerFacts: ["n"] }, "unknown worker fact `n`"],
    [{ requestFacts: ["label-is/zone=a"] }, "unknown request fact `label-is/zone=a`"],
    [{ workerFacts: ["label-is/zone"] }, "unknown worker fact `label-is/zone`"],
    [{ workerFacts: ["taint-is/"] }, "unknown worker fact `taint-is/`"],
    [{ workerFacts: "engine-queue" }, 'workerFacts is "engine-queue": expected an array of names'],
    [{ requestFacts: [1] }, "requestFacts is [1]: expected an array of names"],
  ]) {
    assert.throws(() => ask(asking(wants), { rows: [{ "engine-queue": 1 }] }), (error) => {
      assert.ok(error.message.includes(text), `${error.message}: expected ${text}`);
      return true;
    });
  }
});

test("Math.random depends on the seed of the call only", () => {
  const random = scorer({ ...facts, score: (call) => Array.from({ length: call.rows }, () => Math.random()) });
  const first = ask(random, { rows, seed: 7n });
  ask(random, { rows, seed: 8n });
  assert.deepEqual(ask(random, { rows, seed: 7n }), first);
  assert.notDeepEqual(ask(random, { rows, seed: 8n }), first);
});

test("a component logs what it prints and says what to use instead of a system", () => {
  const dir = mkdtempSync(join(tmpdir(), "policy-"));
  const helper = readFileSync(fileURLToPath(new URL("pointsman-policy.js", import.meta.url)), "utf8");
  writeFileSync(join(dir, "helper.mjs"), `${helper}inComponent((level, line) => globalThis.written.push([level, line]));`);
  const questions = {
    log: () => console.log("one", { two: 2 }, NaN, new Error("three")),
    columns: () => console.log({ seed: 5n, costs: new Float32Array([1, 2]) }),
    cycle: () => { const one = {}; one.one = one; console.log(one); },
    facts: (call, facts) => console.log(facts),
    error: () => console.error("four"),
    warn: () => console.warn(5n),
    assert: () => [console.assert(true, "six"), console.assert(false, "seven")],
    setTimeout: () => setTimeout(() => {}, 0),
    fetch: () => fetch("http://127.0.0.1:1/"),
    now: () => Date.now(),
    date: () => new Date(),
    given: () => new Date(3).getTime(),
    performance: () => performance.now(),
    random: () => crypto.getRandomValues(new Uint8Array(1)),
  };
  const text = Object.entries(questions).map(([name, question]) => `${name}: ${question}`);
  const script = `
    import { scorer } from "./helper.mjs";
    const out = process.stdout, answers = {};
    const questions = { ${text} };
    const { policy, scoring } = scorer({ name: "x", score: (call, facts) => (questions[call.leg](call, facts), [0]) });
    globalThis.written = [];
    policy.configure("{}");
    for (const leg of Object.keys(questions)) {
      try {
        scoring.score({ leg, rows: 1, seed: 1n }, new Uint32Array());
        answers[leg] = written.splice(0);
      } catch (problem) {
        answers[leg] = problem.val.replace(/ \\([^()]*:\\d+\\)$/, "");
      }
    }
    out.write(JSON.stringify(answers));
  `;
  writeFileSync(join(dir, "component.mjs"), script);
  // A process of its own, because it loses its clock.
  const { stdout, stderr } = spawnSync(process.execPath, [join(dir, "component.mjs")], { encoding: "utf8" });
  assert.equal(stderr, "");
  assert.deepEqual(JSON.parse(stdout), {
    log: [["info", 'one {"two":2} NaN Error: three']],
    columns: [["info", '{"seed":"5","costs":[1,2]}']],
    cycle: [["info", "[object Object]"]],
    facts: [["info", '{"rows":1}']],
    error: [["error", "four"]],
    warn: [["warn", "5n"]],
    assert: [["error", "seven"]],
    setTimeout: "Error: setTimeout(): a policy cannot wait: answer at once",
    fetch: "Error: fetch(): a policy has no network: put the values into its settings",
    now: "Error: Date.now(): a policy has no clock: use call.nowUs",
    date: "Error: new Date(): a policy has no clock: use call.nowUs",
    given: [],
    performance: "Error: performance.now(): a policy has no clock: use call.nowUs",
    random: "Error: crypto.getRandomValues(): a policy has no other randomness than its seed: use Math.random, or new Rng(call.seed)",
  });
});

test("t4 names of tenants, digits of ids and facts that are left out", () => {
  let seen;
  const rule = selector({
    name: "x", settings: { tenants: {} },
    requestFacts: ["tenant-hash", "n", "block-size", "program-idle-ms", "priority"], workerFacts: ["worker-id", "load-age-ms", "engine-queue-known", "engine-queue"],
    select: (call, facts) => ((seen = facts), null),
  });
  ask(rule, { rows: [{ "worker-id": "12349305675965833812" }], request: { "tenant-hash": "acme" } });
  // T4.8
  assert.equal(seen["tenant-hash"], 0x724d383f4f6de0fn);
  // T4.9
  assert.deepEqual([...seen["worker-id"]], [12349305675965833812n]);
  const none = 4294967295;
  // T4.10
  assert.deepEqual(["n", "block-size", "program-idle-ms", "priority"].map((name) => Number(seen[name])), [1, 16, none, 0]);
  assert.deepEqual(["load-age-ms", "engine-queue-known", "engine-queue"].map((name) => Number(seen[name][0])), [0, 1, 0]);
});

test("t4 facts may depend on settings", () => {
  const labelled = scorer({
    name: "x",
    settings: { zone: "a" },
    configure({ zone }) {
      this.workerFacts = [`label-is/zone=${zone}`];
    },
    score(call, facts) {
      return [...facts[this.workerFacts[0]]].map((value) => 1 - value);
    },
  });
  // T4.7
  assert.deepEqual(ask(labelled, { rows: [{}, { "label-is/zone=b": 1 }], settings: { zone: "b" } }), { costs: [1, 0] });
  const wrong = scorer({ name: "x", score: () => [], configure() { this.workerFacts = "engine-queue"; } });
  assert.throws(() => ask(wrong), /workerFacts is "engine-queue": expected an array of names/);
});

test("t4 a policy reads and writes state in Node", async () => {
  register(stateForTests);
  const source = `
    import { increment } from "pointsman:policy/state@0.1.1";
    import { selector } from "${new URL("./pointsman-policy.js", import.meta.url)}";
    export const { policy, selecting } = selector({ name: "x", select: () => (increment("count", 1n, 1000) > 2n ? null : 0) });
  `;
  const counting = await import(`data:text/javascript,${encodeURIComponent(source)}`);
  // T4.6
  assert.deepEqual([0, 1, 2].map(() => ask(counting, { rows: [{}] })), [{ row: 0 }, { row: 0 }, "abstain"]);
  const state = await import("pointsman:policy/state@0.1.1");
  state.delete("count");
  assert.deepEqual(ask(counting, { rows: [{}] }), { row: 0 });
  assert.equal(state.get("none"), undefined);
});

test("the shipped policy runs without a component", async () => {
  const dir = mkdtempSync(join(tmpdir(), "policy-"));
  const here = (file) => fileURLToPath(new URL(file, import.meta.url));
  copyFileSync(here("pointsman-policy.js"), join(dir, "pointsman-policy.js"));
  copyFileSync(here("least-loaded/policy.js"), join(dir, "policy.mjs"));
  const policy = await import(pathToFileURL(join(dir, "policy.mjs")));
  assert.equal(ask(policy, { rows: [{ "active-requests": 3 }, { "active-requests": 0 }] }).row, 1);
});
