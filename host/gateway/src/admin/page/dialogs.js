// Dialogs that say what will change, how to undo it, and the command that does the same.
import { send } from "./api.js";
import { button, make } from "./dom.js";
import { number, percent } from "./format.js";
import { called, ofRole, slotName, store, isOut } from "./store.js";

let report = () => {};
/** Where results of commands are told: `report(text, isBad)`. */
export const onResult = (tell) => { report = tell; };

/** Shows a dialog. `rows` are `[what, now, after]`. */
function ask({ title, lead, rows = [], notes = [], yes, risk, command, path, method = "POST" }) {
  const box = document.getElementById("ask");
  const run = async () => {
    box.close();
    try {
      report(told(await send(path, method)), false);
    } catch (error) {
      report(`failed: ${error.message}`, true);
    }
  };
  const cancel = button("", "Cancel", () => box.close());
  const body = rows.map(([what, now, after]) => make("tr", null, make("td.dim", null, what), make("td", { "data-label": "now" }, now), make("td", { "data-label": "after" }, make("b", null, after))));
  box.replaceChildren(
    make("h2", { id: "ask-title" }, title), make("p", null, lead),
    rows.length ? make("table", null, make("thead", null, make("tr", null, make("th"), make("th", null, "now"), make("th", null, "after"))), make("tbody", null, body)) : "",
    make("ul", null, notes.map((note) => make("li", null, note))),
    make("p.mono.dim", null, command),
    make("div.buttons", null, cancel, button(risk ? "risk" : "main", yes, run, { id: "yes" })));
  box.showModal();
  cancel.focus();
}

function told({ changed, refused = [], strays = [], more_strays = 0, compiling = [] }) {
  if (!changed) return "done";
  const also = [`${changed.length} changed`, refused.length && `${refused.length} refused`, compiling.length && `${compiling.length} compiling`, strays.length && `${strays.length + more_strays} of no slot`];
  return `done: ${also.filter(Boolean).join(", ")}`;
}

const flagged = ({ model }) => (model ? ` --model ${model}` : "");
const query = (slot, pairs) => `policies/${slot.slot}/${pairs}${slot.model ? `&model=${encodeURIComponent(slot.model)}` : ""}`;
const program = ({ policy, generation }) => `${policy} @${generation}`;
const inFlight = () => ["requests in flight", number(store.stats?.inflight), "keep the generation they began with"];
const oneGateway = () => `Only the gateway at ${location.host} changes. Others keep what they run.`;

export function askPromote(slot, name) {
  const lane = slot[name], other = name === "canary" ? "shadow" : "canary";
  const decides = slot.canary ? `${program(slot)} for ${percent(1 - slot.canary.share)}, ${program(slot.canary)} for the rest` : `${program(slot)} for all`;
  ask({
    title: `Promote the ${name} of ${slotName(slot)}?`, lead: `${program(lane)} becomes the active policy, as a new generation.`, yes: "Promote",
    rows: [["decides for new requests", decides, `${lane.policy}, for all`], [name, program(lane), "none"], ...(slot[other] ? [[other, program(slot[other]), "stays; compared with the new generation from now on"]] : []), inFlight()],
    notes: ["It lasts until the slot’s file or settings change, or the gateway ends. To keep it, put its file in the place of the active one.", `To undo it, roll back: ${program(slot)} serves again, and the content that was promoted is quarantined.`, oneGateway()],
    command: `pointsman policy promote ${slot.slot} --from ${name}${flagged(slot)}`, path: query(slot, `promote?from=${name}`),
  });
}

export function askRollBack(slot) {
  const before = slot.previous ?? "its previous content";
  ask({
    title: `Roll ${slotName(slot)} back?`, lead: `${before} serves again, as a new generation.`, yes: "Roll back", risk: true,
    rows: [["decides for new requests", program(slot), before], ["canary and shadow", [slot.canary, slot.shadow].filter(Boolean).map(program).join(", ") || "none", slot.canary || slot.shadow ? "stay" : "none"], inFlight()],
    notes: [`The content of ${program(slot)} with these settings is quarantined in every lane of the slot: reading the folder again does not bring it back.`, `To undo it while its file is in the folder: pointsman policy rollback ${slot.slot} --undo${flagged(slot)}`, "It goes back one step. A second rollback is refused until something else was installed.", oneGateway()],
    command: `pointsman policy rollback ${slot.slot}${flagged(slot)}`, path: query(slot, "rollback?lane=active"),
  });
}

export function askEnd(slot, name) {
  const lane = slot[name];
  ask({
    title: `End the ${name} of ${slotName(slot)}?`, lead: `${program(lane)} is called no more.`, yes: `End the ${name}`, risk: true,
    rows: [[name, program(lane), "none"], ["decides for new requests", name === "canary" ? `${program(slot)}, and ${program(lane)} for ${percent(lane.share)}` : program(slot), `${program(slot)}, for all`], inFlight()],
    notes: ["Its content is quarantined: it does not come back until its file or settings change.", oneGateway()],
    command: `pointsman policy rollback ${slot.slot} --lane ${name}${flagged(slot)}`, path: query(slot, `rollback?lane=${name}`),
  });
}

export function askDrain(worker) {
  const name = called(worker.id), { role } = worker;
  const eligible = ofRole(role).filter((one) => !isOut(one)).length;
  const draining = worker.draining ?? worker.out === "draining";
  const after = draining ? Math.min(ofRole(role).length, eligible + 1) : Math.max(0, eligible - (isOut(worker) ? 0 : 1));
  ask({
    title: draining ? `Send requests to ${name} again?` : `Drain ${name}?`, yes: draining ? "Undrain" : "Drain", risk: !draining && after === 0,
    lead: draining ? "It gets requests again as soon as it is healthy." : `It gets no new request. ${number(worker.in_flight)} in flight finish there.`,
    rows: [[`eligible ${role} workers`, number(eligible), after === 0 ? "none: requests that need one fail" : number(after)], ["its share of the legs", percent(worker.part, 1), draining ? "as routing decides" : "goes to the others"]],
    notes: draining ? [] : ["To undo it: Undrain.", oneGateway()],
    command: `pointsman ${draining ? "undrain" : "drain"} ${worker.id}`, path: `workers/${worker.id}/drain`, method: draining ? "DELETE" : "POST",
  });
}

export function askReload() {
  ask({
    title: "Read the policy folder again?", lead: "Files that changed are compiled and installed; those of before serve until then.", yes: "Read again",
    notes: ["The gateway reads the folder by itself when a file changes. This is for file systems that do not tell of changes.", "Content that was rolled back stays in quarantine."],
    command: "pointsman policy reload", path: "policies/reload",
  });
}
