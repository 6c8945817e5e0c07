// What each number means, shown on hover, focus and tap.
import { make } from "./dom.js";

const TEXTS = {
  requests: "Requests that ended, per second: the mean of the last minute. The line has one point a minute for an hour.",
  goodput: "Requests per second that did not fail, had their first token within 2 s and then at most 50 ms between tokens on average.",
  success: "Share of the last minute's requests that did not fail (status 500 and above). Refusals (4xx) and clients that left (499) do not count against it.",
  ttft: "Time to first token: from the first byte of a request to the first token sent to the client, the queue included. Streams of the last minute. Half were faster than p50, 1 in 10 slower than p90, 1 in 100 slower than p99.",
  itl: "Inter-token latency: the mean time between two tokens of one stream. p99: 1 in 100 streams was slower. Streams of the last minute.",
  cache: "Share of prompt tokens that engines found in their KV cache, over the last one to two minutes, of the requests whose engine reports it. Predicted: what routing expected when it chose the worker, of the requests whose policy asked what is cached.",
  queue: "Requests that wait in the gateway because every eligible worker is busy.",
  output: "Output tokens per second that were sent to clients, over the last one to two minutes.",
  flow: "Queue in the gateway, attempts that failed, prefill, transfer of the KV cache, decode. The width is the time; the longest of the shown requests is full.",
  rowTtft: "Time to first token, from the first byte of the request. Streams only.",
  rowItl: "Mean time between two tokens of this stream.",
  tokens: "Prompt tokens, then output tokens.",
  cached: "Prompt tokens that the engine found in its KV cache, as it reported. In brackets: what routing expected, when it differs.",
  lanes: "Active decides for most requests. A canary decides for a small share of them. A shadow is asked as well, and its answer is only compared.",
  trials: "Canary: a policy that decides for a small share of the requests. Shadow: a policy that is asked as well, and its answer is only compared.",
  decisions: "Decisions of requests that ended, in the window or since the policy was installed. A shadow is asked about the canary's requests too; only its answers to active's are compared and counted.",
  rate: "Decisions of active and canary together, of requests that ended: of the last whole minute, or since the active policy was installed.",
  fallback: "Decisions by the built-in selector, because the policy failed, abstained or took too long.",
  failed: "Share of the decisions whose requests did not fail (status 500 and above).",
  call: "99 of 100 calls of the policy took at most this long, since the gateway started, rounded up to the next bucket. Each request waits for its call.",
  share: "Legs that this worker got, as a multiple of an even split among the ranks of all eligible workers of its role that serve the same models, in the last five minutes. 1 is even.",
  flight: "Requests booked on this worker now, by this gateway and its peers, of its limit max_concurrency.",
  load: "Requests booked on this worker now, of its limit max_concurrency; the bar is full at the limit. Cells of workers without a limit: of the busiest worker of their role.",
  kv: "Share of the engine's KV cache in use, as the engine last reported. Above about 90 % engines start to preempt requests.",
  errors: "Share of this worker's legs of the last five minutes that failed. 0 when the engine started anew since, and when none failed in the last minute or two.",
  rankErrors: "Moving share of legs that failed on this rank, which policies read; a new result weighs 1/8.",
  workerTtft: "Moving average of the time from sending a leg to its first token (for a prefill leg: to its answer); a new value weighs 1/8.",
  workerItl: "Moving average of the time between tokens of streams here; a new value weighs 1/8.",
  workerCache: "Of the latest requests recorded here: prompt tokens that the engine found in its cache, as a share of the prompts whose engine reports it. Predicted: what routing expected, of the prompts whose policy asked.",
  waiting: "Prompt tokens booked on the candidate whose prefill has not completed.",
  held: "Blocks of KV cache booked on the candidate.",
  cost: "The policy's own figure for each candidate; the lowest is chosen. Its unit is the policy's: kv-aware counts blocks, predicted-latency prompt tokens that take as long to compute.",
  compute: "Part of this prompt that is not cached on the candidate: it has to be computed there, or on a decode leg transferred to it.",
  before: "Prompts that wait for their prefill on the candidate.",
  heldBar: "KV cache that the candidate would hold with this request, times its weight.",
  active: "Requests booked on the candidate, times the weight active-request-weight; with predicted-latency also their delay by this prompt.",
  agree: "Of the decisions that active and shadow both made: in how many they chose the same worker.",
  hit: "Blocks that were expected to be cached at the choice, as a share of all blocks of the prompts.",
  shed: "Requests that the policy itself refused.",
  spread: "How unevenly legs are spread over workers. Cache-aware routing is uneven on purpose; a worker far above the rest is worth a look.",
  changes: "Changes of policies since the gateway started. The numbers mark their times in the charts.",
  state: "Keys and bytes that the policies of this slot keep in the gateway, of their limits.",
};

/** A label that explains itself. */
export const tip = (key, label) => make("button.tip", { type: "button", "data-tip": key, "data-key": `tip ${key} ${label}` }, label);

/** A figure that explains itself in words of its own. */
export const explained = (text, label) => make("button.tip", { type: "button", "data-text": text, "data-key": `text ${label}` }, label);

const bubble = () => document.getElementById("tip");

function show(node) {
  const box = bubble();
  const at = node.getBoundingClientRect();
  box.textContent = node.dataset.text ?? TEXTS[node.dataset.tip] ?? "";
  node.setAttribute("aria-describedby", "tip");
  box.hidden = false;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  const below = at.bottom + box.offsetHeight + 16 < innerHeight;
  box.style.top = `${scrollY + (below ? at.bottom + 8 : at.top - box.offsetHeight - 8)}px`;
}

export const hideTip = () => { bubble().hidden = true; };

/** Shows explanations wherever a label has one. */
export function startTips() {
  for (const kind of ["pointerover", "focusin", "click"]) {
    document.addEventListener(kind, ({ target }) => {
      const label = target.closest?.(".tip");
      if (label) show(label);
      else hideTip();
    });
  }
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && hideTip());
}
