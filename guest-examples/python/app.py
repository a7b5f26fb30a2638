"""A sampler of its own: min-p with a temperature, worked out here for each token."""

import math
import random

from wit_world.imports import decoding, session
from wit_world.imports.contexts import Context
from wit_world.imports.models import ChatEnd, ChatMessage, Model, TextDecoder

from trellis_guest import Guest

N_TOKENS_MAX = 64


def draw(logprobs: list[float], rng: random.Random, temperature: float, min_p: float) -> int:
    """A token, of those that are at least `min_p` times as probable as the most probable one (arXiv 2407.01082)."""
    most = max(logprobs)
    least = most + math.log(min_p)
    kept = [token for token, logprob in enumerate(logprobs) if logprob >= least]
    # Beside the most probable one, so that not all are 0 where it is cold.
    weights = [math.exp((logprobs[token] - most) / temperature) for token in kept]
    return rng.choices(kept, weights)[0]


class WitWorld(Guest):
    """What the daemon runs."""

    def main(self, arguments: list[str]) -> None:
        temperature, min_p = 0.8, 0.05
        if arguments[:1] == ["--temperature"] and len(arguments) > 1:
            temperature, arguments = float(arguments[1]), arguments[2:]
        if not arguments or temperature <= 0:
            raise SystemExit("usage: [--temperature T] QUESTION, with a T above 0")

        model = Model.open(None)
        context = Context.create(model)
        question = ChatMessage("user", " ".join(arguments))
        context.append(model.encode_chat([question], ChatEnd.ASSISTANT))

        # The seed of the run, so that a run with the same seed says the same.
        rng = random.Random(session.seed())
        stop_tokens = set(model.info().stop_tokens)
        decoder = TextDecoder(model)
        for _ in range(N_TOKENS_MAX):
            [logprobs] = decoding.full([context])
            token = draw(logprobs, rng, temperature, min_p)
            if token in stop_tokens:
                break
            context.append([token])
            session.emit_text(decoder.push(token))
        session.emit_text(decoder.finish() + "\n")
