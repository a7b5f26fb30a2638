// A sampler of its own: min-p with a temperature, worked out here for each token.

import { Context } from "trellis:host/contexts@0.2.0";
import { full } from "trellis:host/decoding@0.2.0";
import { Model, TextDecoder as Decoder } from "trellis:host/models@0.2.0";
import { emitText, seed } from "trellis:host/session@0.2.0";
import { guest } from "./trellis-guest.js";

const N_TOKENS_MAX = 64;

export const run = guest((args) => {
  let temperature = 0.8;
  if (args[0] === "--temperature") temperature = Number(args.splice(0, 2)[1]);
  if (args.length === 0 || !(temperature > 0)) throw "usage: [--temperature T] QUESTION, with a T above 0";

  const model = Model.open();
  const context = Context.create(model);
  const question = { role: "user", content: args.join(" ") };
  context.append(model.encodeChat([question], "assistant"));

  const next = uniform(seed());
  const stopTokens = new Set(model.info().stopTokens);
  const decoder = new Decoder(model);
  for (let n = 0; n < N_TOKENS_MAX; n++) {
    const [logprobs] = full([context]);
    const token = draw(logprobs, next(), temperature, 0.05);
    if (stopTokens.has(token)) break;
    context.append([token]);
    emitText(decoder.push(token));
  }
  emitText(decoder.finish() + "\n");
});

/** A token, of those that are at least `minP` times as probable as the most probable one (arXiv 2407.01082). */
function draw(logprobs, uniform, temperature, minP) {
  const most = logprobs.reduce((a, b) => Math.max(a, b));
  const least = most + Math.log(minP);
  const kept = [];
  let total = 0;
  logprobs.forEach((logprob, token) => {
    if (logprob < least) return;
    // Beside the most probable one, so that not all are 0 where it is cold.
    const weight = Math.exp((logprob - most) / temperature);
    total += weight;
    kept.push([token, weight]);
  });
  let rest = uniform * total;
  return (kept.find(([, weight]) => (rest -= weight) < 0) ?? kept.at(-1))[0];
}

/**
 * Numbers in [0, 1) that depend on the seed of the run alone (SplitMix64). Those of `Math.random` are the same in every run: its
 * state is part of the component.
 */
function uniform(seed) {
  let state = seed;
  return () => {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
    let z = state;
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return Number((z ^ (z >> 31n)) >> 11n) / 2 ** 53;
  };
}
