// Makes the component: the engine with the program in it, in the state in which it is after its modules have been run.

import { writeFile } from "node:fs/promises";
import { componentize } from "@bytecodealliance/componentize-js";

const { component } = await componentize({
  sourcePath: "app.js",
  witPath: "wit",
  worldName: "guest",
  // The host has no network.
  disableFeatures: ["http", "fetch-event"],
});
await writeFile("min-p.wasm", component);
