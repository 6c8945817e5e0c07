// Talks to the gateway: events, answers, commands, and the operator's token.
import { parse } from "./format.js";

const KEY = "pointsman-token";
const EVENTS = "events?kinds=slots,decisions,stats,fleet,hour";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

function authorization() {
  const secret = token.get();
  return secret ? { authorization: `Bearer ${secret}` } : {};
}

/** Returns the JSON of an answer. Throws an error with the gateway's message. */
export async function get(path) {
  return answer(await fetch(path, { headers: authorization() }));
}

/** Sends a command and returns the JSON of the answer. */
export async function send(path, method = "POST") {
  return answer(await fetch(path, { method, headers: { ...authorization(), "content-type": "application/json" } }));
}

async function answer(response) {
  const text = await response.text();
  let value = {};
  try {
    value = parse(text);
  } catch { /* told by the status */ }
  if (response.ok) return value;
  const error = new Error(value.error?.message ?? `the gateway answered ${response.status}`);
  error.status = response.status;
  throw error;
}

/** Handles one block of the event stream. */
export function handleBlock(block, handle) {
  const field = (name) => block.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  const data = field("data");
  if (data) handle(field("event"), parse(data));
}

/** Reads events until the stream ends; returns the status. It uses fetch because an EventSource cannot send the token. */
async function read(signal, handle) {
  const response = await fetch(EVENTS, { headers: authorization(), signal });
  if (!response.ok) return response.status;
  const text = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await text.read();
    if (done) return 200;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) handleBlock(block, handle);
  }
}

let reading = new AbortController();

/** Follows events, and connects again when the connection is lost. `lost` gets the status, or null. */
export async function follow(handle, lost) {
  reading.abort();
  const mine = (reading = new AbortController());
  for (let wait = 500; !mine.signal.aborted; wait = Math.min(wait * 2, 8000)) {
    const began = Date.now();
    let status = null;
    try {
      status = await read(mine.signal, handle);
    } catch { /* no answer */ }
    if (mine.signal.aborted) return;
    lost(status);
    if (status === 401 || status === 403) return;
    if (Date.now() - began > 10000) wait = 500;
    await new Promise((done) => setTimeout(done, wait));
  }
}
