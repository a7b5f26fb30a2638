"""Beam searches of Hugging Face transformers: diverse groups, and many beams.

    python3 beams.py ../../../shared/models/tiny ../../../shared/golden/tiny.json > beams-tiny.json

takes transformers before 4.55, which has groups; made with 4.44.2 and torch 1.13.1, in float32 on the CPU.
"""
import json
import sys

import torch
import transformers

torch.set_num_threads(2)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32).eval()
goldens = json.load(open(sys.argv[2]))
GROUPS = [  # beams, groups, diversity penalty, length penalty, early stopping
    (6, 3, 0.5, 1.0, False),
    (4, 2, 1.5, 1.0, True),
    (8, 4, 0.3, 0.6, "never"),
    (6, 6, 0.8, 2.0, False),
]


def search(case, max_tokens, n_best, **options):
    prompt = torch.tensor([case["prompt_ids"]])
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_tokens,
            num_return_sequences=n_best, return_dict_in_generate=True, output_scores=True, **options)
    sequences = [[t for t in s[prompt.shape[1]:].tolist() if t != model.config.pad_token_id] for s in out.sequences]
    scores = [round(float(s), 5) for s in out.sequences_scores]
    return {"max_tokens": max_tokens, "sequences": sequences, "scores": scores, **options}


cases = []
for idx, case in enumerate(goldens["cases"]):
    searches = [
        search(case, 40, n, num_beams=n, num_beam_groups=g, diversity_penalty=d, length_penalty=lp, early_stopping=es)
        for n, g, d, lp, es in GROUPS
    ]
    if idx == 0:
        searches.append(search(case, 12, 64, num_beams=512, length_penalty=1.0, early_stopping=False))
    cases.append({"prompt_ids": case["prompt_ids"], "searches": searches})
library = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on CPU"
json.dump({"library": library, "cases": cases}, sys.stdout)
print()
