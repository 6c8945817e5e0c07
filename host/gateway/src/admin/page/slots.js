// The slots of the page and their history: active policies, trials, refusals, and buttons for the operator.
// page.js has the helpers for elements, numbers and requests.
"use strict";

function showSlots({ slots, history, strays }) {
  syncChildren($("slots"), slots, (slot) => `${slot.slot} ${slot.model ?? ""}`, () => make("article", "slot"), showSlot);
  const events = [...history].reverse().slice(0, 30);
  const lines = strays.map((file) => ({ file })).concat(events);
  if (!lines.length) $("history").replaceChildren(make("li", "dim", "no changes since the start"));
  else syncChildren($("history"), lines, (line) => JSON.stringify(line), (line) => make("li"), showEvent);
}

function showSlot(node, slot) {
  const open = node.querySelector("details")?.open;
  const focused = node.contains(document.activeElement) ? document.activeElement.textContent : null;
  const title = make("h3", "", slot.slot, make("span", "dim", slot.model ?? ""));
  const badge = slot.breaker_open ? "fallback serves" : slot.state.replaceAll("-", " ");
  title.append(make("span", slot.breaker_open || slot.state === "rolled-back" ? "state bad" : "state", badge));
  const digest = slot.digest ? ` · ${String(slot.digest).slice(0, 8)}` : "";
  const lines = [
    title,
    make("p", "policy", slot.policy, make("span", "dim", ` ${slot.version ?? ""}`)),
    make("p", "dim", `generation ${slot.generation} · ${slot.source}${digest} · ${number(slot.calls)} calls`,
      ...(slot.failures ? [make("span", "bad", `, ${number(slot.failures)} failed`)] : [])),
  ];
  if (slot.parts.length > 1) {
    const part = (one) => `${one.world} ${one.policy}${one.weight === null ? "" : ` × ${number(one.weight, 3)}`}`;
    lines.push(make("p", "dim", slot.parts.map(part).join(" → ")));
  }
  lines.push(make("p", "dim", `grants: ${slot.grants.join(", ") || "none"}`, ...stateUsage(slot.memory)));
  lines.push(...oneWorker(slot, ""));
  if (slot.canary) lines.push(describeTrial("canary", slot, ""), ...oneWorker(slot.canary, "canary: "));
  if (slot.shadow) {
    const { agree, disagree, failed } = slot.shadow;
    const asked = agree + disagree + failed;
    lines.push(describeTrial("shadow", slot, asked ? ` · agrees in ${number((100 * agree) / asked)} % of ${number(asked)}` : ""));
  }
  const last = slot.refusals.at(-1);
  if (last) {
    const all = [...slot.refusals].reverse().map((one) => make("p", "dim", `${formatTime(one.at_ms)} ${one.kind} ${one.file}: ${one.message}`));
    const details = make("details", "", make("summary", "warn", `refused ${formatTime(last.at_ms)}: ${last.kind}`), ...all);
    details.open = Boolean(open);
    lines.push(details);
  }
  if (state.mayChange && slot.can_roll_back) {
    const question = `Roll ${slotName(slot)} back from ${slot.policy} to its previous content?`;
    lines[2].append(" ", slotButton(slot, "Roll back", "rollback?lane=active", question));
  }
  node.replaceChildren(...lines);
  // Restore the focus.
  if (focused) [...node.querySelectorAll("button, summary")].find((one) => one.textContent === focused)?.focus();
}

/** Says that a lane chooses one worker only while others get nothing. */
function oneWorker({ only_choice: only }, lane) {
  if (!only) return [];
  const worker = only.worker_text ?? only.worker;
  return [make("p", "warn", `${lane}the last ${number(only.decisions)} decisions all chose worker ${worker}/${only.dp_rank}`)];
}

/** Describes how full the state of a slot's policies is; the fuller of keys and bytes sets the colour. */
function stateUsage(memory) {
  if (!memory) return [];
  const full = Math.max(memory.entries / memory.entries_limit, memory.bytes / memory.bytes_limit);
  const text = ` · state ${number(memory.entries)} keys, ${number(memory.bytes / 1024, 1)} of ${number(memory.bytes_limit / 1024)} KiB`;
  const node = make("span", full > 0.9 ? "bad" : full > 0.7 ? "warn" : "", text);
  node.title = `${number(memory.entries)} of ${number(memory.entries_limit)} keys, ${number(memory.bytes)} of ${number(memory.bytes_limit)} bytes`;
  return [node];
}

function describeTrial(name, slot, more) {
  const lane = slot[name];
  const digest = lane.digest ? ` · ${String(lane.digest).slice(0, 8)}` : "";
  const text = `${name} ${lane.policy} @${lane.generation}${digest} · ${number(lane.share * 100, 1)} % · ${number(lane.calls)} calls`;
  const failed = lane.failures ? [make("span", "bad", `, ${number(lane.failures)} failed`)] : [];
  const buttons = [
    slotButton(slot, `Promote ${name}`, `promote?from=${name}`, `Promote ${lane.policy} to serve all requests of ${slotName(slot)}?`),
    slotButton(slot, `End ${name}`, `rollback?lane=${name}`, `End the ${name} ${lane.policy} of ${slotName(slot)}?`),
  ];
  return make("p", lane.breaker_open ? "bad" : "", text, ...failed, more, " ", ...(state.mayChange ? buttons : []));
}

const slotName = (slot) => slot.slot + (slot.model ? ` of ${slot.model}` : "");

/** Returns a button that asks for confirmation and then sends a command for a slot. */
function slotButton(slot, label, path, question) {
  const model = slot.model ? `&model=${encodeURIComponent(slot.model)}` : "";
  const button = make("button", "", label);
  button.type = "button";
  button.addEventListener("click", () => askToConfirm(question, `policies/${slot.slot}/${path}${model}`));
  return button;
}

function showEvent(node, line) {
  if (line.file) return node.replaceChildren(make("span", "warn", "no slot for"), make("span", "", line.file));
  const kind = { refused: "warn", rolled_back: "bad", withdrawn: "bad" }[line.result] ?? "good";
  const lane = line.lane === "active" ? "" : ` ${line.lane}`;
  const what = line.result === "refused" ? line.reason : `${line.policy ?? "empty"}${line.generation === null ? "" : ` · generation ${line.generation}`}`;
  node.replaceChildren(make("time", "", formatTime(line.at_ms)), make("span", kind, line.result.replaceAll("_", " ")), make("span", "", `${line.slot}${lane}${line.model ? ` of ${line.model}` : ""}: ${what}`));
}
