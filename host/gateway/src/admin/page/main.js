// The page at the root of the admin port: follows events, shows one view, and takes the operator's token.
import { follow, token } from "./api.js";
import { onResult } from "./dialogs.js";
import { make, setText } from "./dom.js";
import { fleet } from "./fleet.js";
import { clock } from "./format.js";
import { overview } from "./overview.js";
import { request } from "./request.js";
import { slot } from "./slot.js";
import { store, take } from "./store.js";
import { hideTip, startTips } from "./tips.js";
import { worker } from "./worker.js";

const VIEWS = { overview, fleet, slot, request, worker };
/** A view is drawn at most once in this time, milliseconds. */
const INTERVAL = 1000;
const $ = (id) => document.getElementById(id);
const page = { view: null, changed: new Set(), drawn: 0, timer: 0, heard: null, isLost: false };

function open() {
  const [name, ...parts] = (location.hash.slice(1) || "overview").split("/");
  if (!Object.hasOwn(VIEWS, name)) return void location.replace("#overview");
  page.view?.close();
  $("ask").close();
  hideTip();
  const root = make("div.stack");
  $("main").replaceChildren(root);
  for (const link of document.querySelectorAll("header nav a")) {
    if (link.hash === `#${{ request: "overview", worker: "fleet" }[name] ?? name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${name[0].toUpperCase()}${name.slice(1)} – Pointsman`;
  page.view = VIEWS[name](root, parts.map(decoded));
  page.changed = new Set(page.view.kinds.filter((kind) => store.known.has(kind)));
  scrollTo(0, 0);
  page.drawn = 0;
  draw();
}

/** A part of the address. One that was not encoded stays as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Draws what changed, unless nobody looks. */
function draw() {
  page.timer = 0;
  if (document.hidden || !page.changed.size) return;
  const wanted = new Set([...page.changed].filter((kind) => page.view.kinds.includes(kind)));
  page.changed = new Set();
  page.drawn = Date.now();
  // What a view leaves for later is drawn with the next change.
  for (const kind of (wanted.size && page.view.update(wanted)) || []) page.changed.add(kind);
  if (page.changed.size) soon();
}

function soon() {
  if (!page.timer) page.timer = setTimeout(draw, Math.max(50, page.drawn + INTERVAL - Date.now()));
}

function setStatus(text, bad) {
  setText($("state"), text);
  $("live").classList.toggle("bad", bad);
}

/** Shows that events come, and whether the gateway is ready. */
function setLive() {
  if (!store.stats) return setStatus("loading", false);
  const ready = store.stats?.ready ?? true;
  setStatus(ready ? "live" : "live, not ready", !ready);
}

function handle(kind, data) {
  const before = store.stats?.ready;
  take(kind, data);
  page.heard = Date.now();
  if (kind === "stats" && data.ready !== before) setLive();
  if (kind === "hello") {
    setText($("version"), ` · ${data.version} · ${location.host}`);
    $("give").hidden = data.may_change;
    $("forget").hidden = !(data.token && data.may_change);
    if (data.may_change) $("token").hidden = true;
    else if (token.get()) askForToken("wrong token");
    setLive();
    if (page.isLost) page.view.again?.();
    page.isLost = false;
    for (const each of page.view.kinds) if (store.known.has(each)) page.changed.add(each);
  } else {
    page.changed.add(kind);
  }
  soon();
}

function askForToken(problem) {
  token.forget();
  $("token").hidden = false;
  setText($("refused"), problem);
  setStatus("token required", true);
  $("secret").focus();
}

function connect() {
  follow(handle, (status) => {
    page.isLost = true;
    if (status === 401 || status === 403) askForToken(status === 403 ? "wrong token" : "");
    else setStatus(`disconnected, reconnecting${page.heard ? `; all figures are as of ${clock(page.heard)}` : ""}`, true);
  });
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("secret").value.trim());
  $("secret").value = "";
  setText($("refused"), "");
  connect();
});
$("give").addEventListener("click", () => {
  $("token").hidden = false;
  $("secret").focus();
});
$("forget").addEventListener("click", () => {
  token.forget();
  connect();
});
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
document.addEventListener("visibilitychange", soon);
addEventListener("hashchange", open);
onResult((text, bad) => {
  setStatus(text, bad);
  if (!bad) setTimeout(() => $("state").textContent === text && setLive(), 6000);
});
startTips();
open();
connect();
