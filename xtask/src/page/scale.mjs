// Measures the page with 1,000 workers and 200 requests a second. The events are those that the gateway sends then:
// the same fields, from a server here that takes the page's files from the gateway. A gateway sends the fleet and the
// newest 100 decisions once a second.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { readFileSync } from "node:fs";

const WORKERS = 1000;
const RATE = 200;
const POLL = 500;
/** The page may take this much, and is measured for this long after it has settled. */
const MAX_BYTES = 100 * 2 ** 20;
const MAX_SHARE = 0.1;
const SETTLE = 6000;
const SECONDS = 20;
const PER_EVENT = 100;

let seed = 7;
const random = () => (seed = (seed * 1664525 + 1013904223) >>> 0) / 2 ** 32;
const pick = (from, count) => from + Math.floor(random() * count);

const workers = Array.from({ length: WORKERS }, (_, place) => ({
  id: String(place + 1), url: `http://10.0.${place >> 8}.${place & 255}:8000`, role: place < 400 ? "prefill" : "decode", zone: "abc"[place % 3],
  out: place % 97 === 96 ? "not_ready" : null, reason: place % 97 === 96 ? "GET /health: connection refused" : null, legs: place === 216 ? 900 : 90, in_flight: 3, limit: 16, kv: 0.4, failed: 0, ranks: 1, models: 1,
}));

function fleet() {
  for (const worker of workers) Object.assign(worker, { legs: Math.max(0, worker.legs + pick(-3, 7)), in_flight: pick(0, 12), kv: Math.round(random() * 1000) / 1000 });
  const columns = Object.keys(workers[0]);
  return { columns, workers: workers.map((worker) => Object.values(worker)) };
}

let number = 0;
const recent = [];

/** The decisions of the requests since the last event: plan, prefill and decode of each. */
function decisions() {
  for (let count = 0; count < (RATE * 2 * POLL) / 1000; count += 1) {
    number += 1;
    const [prefill, decode] = [pick(1, 400), pick(401, 600)];
    const outcome = {
      status: number % 50 ? 200 : 502, code: number % 50 ? "ok" : "engine_failed", retried: false, ttft_ms: 100 + random() * 300, itl_ms: 12, output_tokens: 40, output_tokens_source: "usage", prompt_tokens: 900,
      ended_at_ms: Date.now() + number, duration_ms: 700 + random() * 300, cached_tokens: { predicted: 512, reported: 480 }, times_ms: { queued: null, prefill_sent: 2, prefill_ended: 80, answer_sent: 81 },
    };
    const one = (leg, slot, more) => ({
      id: (number * 4 + ["plan", "prefill", "decode"].indexOf(leg)).toString(16).padStart(16, "0"), at_ms: Date.now(), request_id: `request-${number}`, model: "large-70b", leg: leg === "plan" ? "decode" : leg, attempt: 0, slot,
      generation: 14, mode: number % 20 ? "active" : "canary", policy: "kv-aware", decider: { by: "policy" }, reason: "", plan: null, refused: null, eligible: 400, took_us: 41, outcome, runner_up: { row: 3, worker: prefill, dp_rank: 0, cost: 9 },
      shadow: { generation: 16, choice: [pick(1, 400), 0], agrees: number % 4 > 0, cached_blocks: null }, ...more,
    });
    recent.unshift(one("plan", "decode-override", { choice: null, shadow: null, plan: { word: "remote", decode: [decode, 0] } }));
    recent.unshift(one("prefill", "prefill", { choice: { row: 1, worker: prefill, dp_rank: 0, cost: 8.5 } }));
    recent.unshift(one("decode", "decode", { shadow: null, choice: { row: 1, worker: decode, dp_rank: 0, cost: 8.5 } }));
  }
  recent.length = Math.min(recent.length, PER_EVENT);
  return { on: true, lost: 0, decisions: recent, unrouted: [] };
}

const load = () => ({
  requests_per_second: RATE + random(), goodput_per_second: RATE - 4, errors_per_second: 4, refusals_per_second: 0, ttft_p50_ms: 180 + random() * 9, ttft_p90_ms: 400, ttft_p99_ms: 1000, itl_p50_ms: 11, itl_p90_ms: 14, itl_p99_ms: 23,
  cached_share: 0.61, predicted_share: 0.64, output_tokens_per_second: 8000, inflight: 160, connections: 200, session_bindings: 0, queue: { waiting: pick(0, 9), waiting_bytes: 0 }, ready: true, reasons: [],
});
const minutes = () => Array.from({ length: 60 }, (_, place) => ({ ...load(), at_ms: Date.now() - (60 - place) * 60e3, waiting: pick(0, 9) }));

/** Serves the page's files from the gateway, its slots, and made events. */
async function serve(url) {
  const policies = await (await fetch(new URL("policies", url))).json();
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, url);
    if (pathname === "/events") {
      response.writeHead(200, { "content-type": "text/event-stream" });
      const send = (kind, data) => response.write(`event: ${kind}\ndata: ${JSON.stringify(data)}\n\n`);
      send("hello", { version: "test", token: false, may_change: true });
      send("slots", policies);
      send("hour", { minutes: minutes() });
      let polls = 0;
      const tick = () => {
        send("stats", load());
        if (polls % 2 === 0) {
          send("fleet", fleet());
          send("decisions", decisions());
        }
        polls += 1;
      };
      tick();
      const timer = setInterval(tick, POLL);
      return response.on("close", () => clearInterval(timer));
    }
    const answer = await fetch(new URL(request.url, url)).catch(() => null);
    if (!answer) return response.writeHead(502).end();
    response.writeHead(answer.status, Object.fromEntries([...answer.headers].filter(([name]) => ["content-type", "content-security-policy"].includes(name))));
    response.end(Buffer.from(await answer.arrayBuffer()));
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return server;
}

/** Private memory of a process in bytes, from the kernel. */
function privateBytes(pid) {
  const text = readFileSync(`/proc/${pid}/smaps_rollup`, "utf8");
  const kib = (name) => Number(text.match(new RegExp(`^${name}:\\s+(\\d+)`, "m"))?.[1] ?? 0);
  return (kib("Private_Clean") + kib("Private_Dirty")) * 1024;
}

/** Measures the views that change all the time. Returns lines that say the figures. */
export async function measure(context, url, pictures) {
  const server = await serve(url);
  const lines = [];
  try {
    const page = await context.newPage();
    const session = await context.newCDPSession(page);
    await session.send("Performance.enable", { timeDomain: "threadTicks" });
    const metrics = async () => Object.fromEntries((await session.send("Performance.getMetrics")).metrics.map(({ name, value }) => [name, value]));
    for (const view of ["overview", "fleet"]) {
      await page.goto(`http://127.0.0.1:${server.address().port}/#${view}`);
      await page.reload();
      await page.locator(view === "fleet" ? ".cells i" : ".requests .flow").first().waitFor();
      await page.waitForTimeout(SETTLE);
      const before = await metrics(), began = Date.now();
      await page.waitForTimeout(SECONDS * 1000);
      const after = await metrics(), seconds = (Date.now() - began) / 1000;
      const share = (after.TaskDuration - before.TaskDuration) / seconds;
      const browser = await context.browser().newBrowserCDPSession();
      const { processInfo } = await browser.send("SystemInfo.getProcessInfo");
      const largest = () => Math.max(...processInfo.filter(({ type }) => type === "renderer").map(({ id }) => privateBytes(id)));
      const peak = largest();
      // The browser collects garbage when it likes: what counts is what the page keeps.
      await session.send("HeapProfiler.collectGarbage");
      await page.waitForTimeout(500);
      const bytes = largest();
      const mib = (value) => (value / 2 ** 20).toFixed(0);
      lines.push(`${view} with ${WORKERS} workers and ${RATE} requests/s: ${(share * 100).toFixed(1)} % of a core, ${mib(bytes)} MiB of private memory (${mib(peak)} before garbage is collected)`);
      await page.screenshot({ path: `${pictures}/scale-${view}.png` });
      if (view === "fleet") {
        assert.equal(await page.locator(".cells i").count(), WORKERS);
        await page.locator(".cells").first().focus();
        for (const key of ["ArrowRight", "ArrowDown", "Enter"]) await page.keyboard.press(key);
        assert.match(new URL(page.url()).hash, /^#worker\//, "arrow keys move among cells, Enter opens one");
      }
      assert(share <= MAX_SHARE, lines.at(-1));
      assert(bytes <= MAX_BYTES, lines.at(-1));
    }
    await page.close();
  } finally {
    server.closeAllConnections();
    server.close();
  }
  return lines;
}
