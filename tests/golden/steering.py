"""Steered contexts of Hugging Face transformers: vectors added to the residual stream from a token on.

    python3 steering.py ../../daemon/models/tiny > steering-tiny.json
    python3 steering.py ../../daemon/models/draft > steering-draft.json

made with the versions that the file names, in float32 on the CPU. A forward hook adds a vector to what
`model.model.layers[n - 1]` gives, or for n = 0 to what the embedding gives, for every token from `start` on: activation
addition (Turner and others, arXiv 2308.10248). Nothing is cached: for each greedy token all is computed from the first token on.

States are those of `output_hidden_states`, as hidden.py says of them. State n has what is added after n layers.
"""
import itertools
import json
import math
import sys

import torch
import transformers

torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
N_LAYERS, HIDDEN_SIZE = model.config.num_hidden_layers, model.config.hidden_size
MIDDLE = (N_LAYERS + 1) // 2
# Of a state and of the log-probabilities every so manieth number: odd, so that no lane of a kernel is left out.
STATE_STRIDE, ROW_STRIDE = 23, 67
N_TOP = 4
N_GREEDY = 24
# The least by which a greedy token is likelier than every other: 50 times what the test allows of a log-probability.
CLEAR_NAT = 0.05
# The least by which steering moves the log-probabilities of a place: a hundred times.
MOVED_NAT = 0.1
# The fewest greedy tokens that differ, where what is added is no larger than the states: one that always comes tells little.
N_DISTINCT = 8

BEGIN = "<|begin_of_text|>"
# Four pages of 16 tokens, the last one begun.
STORY = BEGIN + "Once upon a time there was a little girl who lived in a small house near the forest. One day she went out " \
    "to look for her cat, and on the way she met an old man with a long white beard."
CHAT = BEGIN + "<|user|>\nTell me a short story.<|end|>\n<|assistant|>\n"
RUST = BEGIN + "Ownership is a set of rules that govern how a program manages memory. All programs have to"

# What it is, the prompt, the first steered token, and what is added: after how many layers, and how large against the states
# that it is added to.
CASES = [
    ("behind the embedding, from the first token on", STORY, 0, [(0, 0.5)]),
    ("behind the middle layer, from the first token on", STORY, 0, [(MIDDLE, 0.25)]),
    ("behind the first layer, from a page's first token on", STORY, 16, [(1, 0.5)]),
    ("behind the embedding, from a page's last token on", STORY, 31, [(0, 1)]),
    ("behind the last layer, from within a page on", STORY, 21, [(N_LAYERS, 0.5)]),
    ("behind several layers", STORY, 5, [(0, 0.25), (1, 0.25), (MIDDLE, 0.125), (N_LAYERS, 0.25)]),
    ("behind all layers", RUST, 9, [(n_layers, 0.125) for n_layers in range(N_LAYERS + 1)]),
    ("a thousand times the states", STORY, 33, [(MIDDLE, 1024)]),
    ("a hundred times the states, in three places", RUST, 16, [(0, 128), (1, 128), (N_LAYERS - 1, 128)]),
    ("the last token of the prompt and what follows", CHAT, -1, [(MIDDLE, 0.5)]),
    ("what follows the prompt", CHAT, None, [(1, 0.25), (N_LAYERS, 0.25)]),
    ("a prompt of one token", BEGIN, 0, [(0, 0.5), (MIDDLE, 0.25)]),
]
# The vector of the last case leads from the one to the other.
TEXTS = (BEGIN + "The old king lived in a castle by the sea", BEGIN + "fn main() { let x = 5; println!(")


def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)


def adding(vector, start):
    def hook(_module, _inputs, output):
        output = output.clone()
        output[:, start:] += vector["unit"] * torch.tensor(vector["values"], dtype=torch.float32)
        return output
    return hook


def forward(tokens, vectors=(), start=0):
    """States and log-probabilities of all places: [n_tokens, n_states, hidden_size], [n_tokens, vocab_size]."""
    places = [model.model.embed_tokens, *model.model.layers]
    # Before the hooks by which transformers records states: behind them, states would lack what their layer's hook adds.
    hooks = [places[v["layer"]].register_forward_hook(adding(v, start), prepend=True) for v in vectors]
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(out.hidden_states) == N_LAYERS + 1
    return torch.stack(out.hidden_states, 2)[0], torch.log_softmax(out.logits[0].double(), -1)


def rms(numbers):
    return float(numbers.double().square().mean().sqrt())


def sized(layer, values, strength, states):
    """Whole numbers, and the power of two that makes them about so many times as large as states there."""
    # The last state is behind the norm: the one before is about as large as what the norm takes.
    size = strength * rms(states[:, min(layer, N_LAYERS - 1)]) / rms(torch.tensor(values))
    return {"layer": layer, "unit": 2.0 ** round(math.log2(size)), "values": values}


def made_up(prompt, added):
    """Vectors without end, for the case that some do not do."""
    states, _ = forward(prompt)
    for seed in itertools.count():
        yield [
            sized(layer, [(7 * i * i + 13 * i + 31 * layer + 5 * seed) % 17 - 8 for i in range(HIDDEN_SIZE)], strength, states)
            for layer, strength in added
        ]


def of_two_texts(_prompt):
    """From one text to another, as the paper has it: the difference of what the middle layer makes of their last tokens."""
    one, other = (forward(encode(text))[0][-1, MIDDLE] for text in TEXTS)
    for strength in range(8, 64):
        yield [{"layer": MIDDLE, "unit": 2.0 ** -5, "values": (strength * (other - one)).round().int().tolist()}]


def greedy(prompt, vectors, start):
    """What comes of a prompt, with the log-probability of each token; none where two tokens are about as likely."""
    tokens, logprobs = list(prompt), []
    while len(logprobs) < N_GREEDY:
        best = forward(tokens, vectors, start)[1][-1].topk(2)
        if best.values[0] - best.values[1] < CLEAR_NAT:
            return None
        tokens.append(int(best.indices[0]))
        logprobs.append(round(float(best.values[0]), 5))
    return tokens, logprobs


def rounded(numbers, stride=1):
    return [round(float(x), 5) for x in numbers[::stride]]


def of_vectors(prompt, start, vectors, n_distinct):
    """None where the greedy tokens are not clear, or few, or steering moves little."""
    found = greedy(prompt, vectors, start)
    if found is None or len(set(found[0][len(prompt):])) < n_distinct:
        return None
    tokens, greedy_logprobs = found
    (states, logprobs), (_, plain) = forward(tokens, vectors, start), forward(tokens)
    moved = (logprobs - plain).abs().amax(-1)
    assert moved[:start].sum() < 1e-3
    if moved[start:].min() < MOVED_NAT:
        return None
    n_prompt = len(prompt)
    places = []
    for idx in sorted({start - 1, start, n_prompt - 1, len(tokens) - 2} - {-1}):
        top = logprobs[idx].topk(N_TOP)
        places.append({
            "idx": idx,
            "states": [rounded(state, STATE_STRIDE) for state in states[idx]],
            "logprobs": rounded(logprobs[idx], ROW_STRIDE),
            "top_ids": top.indices.tolist(),
            "top_logprobs": rounded(top.values),
        })
    return {
        "prompt_ids": prompt,
        "start": start,
        "vectors": vectors,
        "greedy_ids": tokens[n_prompt:],
        "greedy_logprobs": greedy_logprobs,
        # Over all tokens that are steered: [n_states, hidden_size / stride]
        "mean": [rounded(state, STATE_STRIDE) for state in states[start:].double().mean(0)],
        # Of some tokens, of the prompt and of what follows: [n_states, hidden_size / stride], [vocab_size / stride], [n_top]
        "places": places,
    }


def case(about, text, start, vectors_of, n_distinct=N_DISTINCT):
    prompt = encode(text)
    start = len(prompt) if start is None else start % len(prompt)
    made = next(made for vectors in vectors_of(prompt) if (made := of_vectors(prompt, start, vectors, n_distinct)))
    return {"about": about, **made}


cases = [
    case(about, text, start, lambda prompt: made_up(prompt, added), N_DISTINCT if added[0][1] <= 1 else 1)
    for about, text, start, added in CASES
]
cases.append(case("from one text to another", STORY, 8, of_two_texts))
library = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on CPU"
goldens = {"library": library, "state_stride": STATE_STRIDE, "row_stride": ROW_STRIDE, "cases": cases}
json.dump(goldens, sys.stdout, separators=(",", ":"))
print()
