// What every guest in JavaScript wants: its arguments, and exceptions that reach the client as errors.

import { arguments as args } from "trellis:host/session@0.2.0";

// Much more than a client shows of an error.
const N_CHARACTERS_MAX = 4000;

/**
 * What a world exports as `run`, of a function that may throw: a text is the error itself, anything else comes with its stack, and
 * an error of the host with what it holds.
 */
export function guest(main) {
  return () => {
    try {
      main(args());
    } catch (error) {
      throw text(error).slice(0, N_CHARACTERS_MAX);
    }
  };
}

function text(error) {
  if (typeof error === "string") return error;
  const held = error?.payload;
  const beside = held === undefined ? "" : ` ${JSON.stringify(held, (_, value) => typeof value === "bigint" ? `${value}` : value)}`;
  return `${error}${beside}\n${error?.stack ?? ""}`.trimEnd();
}
