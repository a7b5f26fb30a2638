"""Hidden states of Hugging Face transformers: `output_hidden_states` of a prompt, layer by layer.

    python3 hidden.py ../../daemon/models/tiny tiny.json > hidden-tiny.json

made with the versions that the file names, in float32 on the CPU. State 0 is the embedding, state i what layer i gives,
the last one what is left after the final norm.
"""
import json
import sys

import torch
import transformers

torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
goldens = json.load(open(sys.argv[2]))
N_STATES = model.config.num_hidden_layers + 1
# Of each state every eighth number: enough to tell any two apart.
STRIDE = 8
# Of an answer the first tokens.
N_GREEDY = 4


def rounded(state):
    return [round(float(x), 5) for x in state[::STRIDE]]


cases = []
for case in goldens["cases"][:3]:
    # The prompt and what the model answers: the states from which the answer was drawn are those of a generation.
    greedy = case["greedy_ids"][:N_GREEDY]
    tokens = case["prompt_ids"] + greedy
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert len(states) == N_STATES
    n_prompt = len(case["prompt_ids"])
    cases.append({
        "prompt_ids": case["prompt_ids"],
        "greedy_ids": greedy,
        # [n_greedy, n_states, hidden_size / stride]
        "last": [[rounded(state[0, n_prompt - 1 + i]) for state in states] for i in range(len(greedy))],
        # [n_states, hidden_size / stride], over the prompt, and over all of it but the first token
        "mean": [rounded(state[0, :n_prompt].mean(0)) for state in states],
        "mean_from_1": [rounded(state[0, 1:n_prompt].mean(0)) for state in states],
    })
library = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on CPU"
json.dump({"library": library, "stride": STRIDE, "cases": cases}, sys.stdout)
print()
