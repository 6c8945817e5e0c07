// Makes a component of one JavaScript file: node componentize.mjs SOURCE WIT WORLD OUT. Every feature that would import WASI
// is off.
import { writeFile } from "node:fs/promises";

import { componentize } from "@bytecodealliance/componentize-js";

// The tool writes the time into the code. With a fixed one the code of two builds is the same, and is compiled once.
Date.now = () => 0;

const [sourcePath, witPath, worldName, out] = process.argv.slice(2);
const disableFeatures = ["random", "stdio", "clocks", "http", "fetch-event"];
const { component } = await componentize({ sourcePath, witPath, worldName, disableFeatures });
await writeFile(out, component);
