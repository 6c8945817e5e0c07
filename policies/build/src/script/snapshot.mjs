// Runs a policy in the engine that an earlier build prepared, takes the snapshot of its memory, and checks it as componentize-js
// does: node snapshot.mjs RECORD SOURCES MODULES. Fails where the whole build has to tell what is wrong.
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const [record, sources, modules] = process.argv.slice(2);
const folders = [["{record}", record], ["{sources}", sources], ["{modules}", modules]];
const placed = (_, value) => (typeof value === "string" ? folders.reduce((text, [name, folder]) => text.replaceAll(name, folder), value) : value);
const { command, args, env, input } = JSON.parse(readFileSync(join(record, "call.json"), "utf8"), placed);
const ran = spawnSync(command, args, { env, input, encoding: "utf8", stdio: ["pipe", "ignore", "pipe"] });
if (ran.status !== 0) throw new Error(ran.stderr || String(ran.error));

const snapshot = await WebAssembly.compile(readFileSync(join(record, "out.wasm")));
const imports = {};
for (const { module, name } of WebAssembly.Module.imports(snapshot)) {
  (imports[module] ??= {})[name] = () => {
    throw new Error(`the check called ${name}`);
  };
}
const { exports } = await WebAssembly.instantiate(snapshot, imports);
if (exports.check_init() !== 0) throw new Error("the source lacks an export of its world");
