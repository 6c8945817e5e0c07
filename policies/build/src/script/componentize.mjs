// Makes a component of one JavaScript file: node componentize.mjs SOURCE WIT WORLD OUT [RECORD]. Every feature that would import
// WASI is off. RECORD is a folder for what later builds of the world start from: the engine with the world's bindings, the call
// that takes the snapshot of its memory, and the snapshot.
import childProcess from "node:child_process";
import { copyFileSync, mkdirSync, writeFileSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { syncBuiltinESMExports } from "node:module";
import { dirname, join } from "node:path";

// The tool writes the time into the code. With a fixed one the code of two builds is the same, and is compiled once.
Date.now = () => 0;

const [sourcePath, witPath, worldName, out, record] = process.argv.slice(2);

if (record) {
  const { spawnSync } = childProcess;
  childProcess.spawnSync = (command, args, options) => {
    const ran = spawnSync(command, args, options);
    if (ran.status === 0) recorded(command, args, options);
    return ran;
  };
  syncBuiltinESMExports();
}

/** Keeps the call that took the snapshot, without the names of this build's folders. */
function recorded(command, args, { env, input }) {
  const engine = args.at(-1);
  const folders = [[dirname(engine), "{record}"], [dirname(sourcePath), "{sources}"], [process.cwd(), "{modules}"]];
  const named = (_, value) => (typeof value === "string" ? folders.reduce((text, [folder, name]) => text.replaceAll(folder, name), value) : value);
  mkdirSync(join(record, "sources"), { recursive: true });
  for (const file of ["in.wasm", "out.wasm", "sources/initializer.js"]) copyFileSync(join(dirname(engine), file), join(record, file));
  writeFileSync(join(record, "call.json"), JSON.stringify({ command, args, env, input }, named));
}

const { componentize } = await import("@bytecodealliance/componentize-js");
const disableFeatures = ["random", "stdio", "clocks", "http", "fetch-event"];
const { component } = await componentize({ sourcePath, witPath, worldName, disableFeatures });
await writeFile(out, component);
