"""GGUF files on the other side: llama.cpp, through the library inside of the package xllamacpp, and the package gguf.

    pip install xllamacpp gguf numpy
    pip download --no-deps dashscope; python3 llama_cpp.py merges dashscope-*.whl > qwen-merges.txt    # a part of Qwen's vocabulary
    cargo test -p trellis-engine --test gguf -- --ignored --nocapture files_for_goldens    # writes files, and says where
    python3 llama_cpp.py blocks > gguf-blocks.json
    python3 llama_cpp.py logprobs FOLDER > gguf-tiny.json
    python3 llama_cpp.py tokens FOLDER > gguf-tokens.json
    python3 llama_cpp.py quantised FOLDER    # tiny by llama.cpp's own quantiser, which the next one reads:
    cargo test -p trellis-engine --test gguf -- --ignored --nocapture files_of_the_quantiser

`logprobs` computes in float32 with the numbers that the package gguf makes of a file, so that only the reading of the file is
compared: llama.cpp's own kernels round activations to 8 bits beside quantised weights.
"""
import base64
import ctypes as C
import json
import os
import struct
import sys
import tempfile
import zipfile

import gguf
import numpy as np
import xllamacpp
import xllamacpp.xllamacpp as library

L = C.CDLL(library.__file__)
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"]
N_TOP = 5
N_FIRST_MERGES = 3000

PROMPTS = [
    [0, 3, 206, 498, 314, 228, 26, 30, 474, 228, 27, 31, 38, 6, 206, 4, 206],
    [0] + [(idx * 37) % 4000 + 8 for idx in range(24)],
]

TEXTS = [
    "",
    " ",
    "   ",
    "the thing and the other",
    "  The  thing\t\tand\n\n the\r\n other  ",
    "it's DON'T we'LL they're I'VE",
    "12345 1,234.5 1e10 ٣٤٥ Ⅷ",
    "naïve café Ünïcødé éèê",
    "日本語のテキスト 你好世界 안녕하세요",
    "def f(x):\n    return x**2  # comment\n",
    "!!!??? ... --- /// \\\\ <|>",
    "CamelCaseWords andHTTPServer ABCdef",
    "🙂 🇩🇪 👩‍👩‍👧 \u0000 \ufeff",
    "<|user|>\nthe<|end|> <|assistant|> [tool] </s><s> a",
    "e\u0301 a\u0308 \u00a0 \u2003 x",
    "in the beginning on the other hand ing▁the▁",
    "a<|im_start|>b<|im_end|> <|fim_pad|></s><|file_sep|>",
]


class Parameters(C.Structure):
    """A structure that is passed by value: longer than any version of it."""

    _fields_ = [("bytes", C.c_uint8 * 1024)]


L.llama_model_default_params.restype = Parameters
L.llama_context_default_params.restype = Parameters
L.llama_model_load_from_file.restype = C.c_void_p
L.llama_model_load_from_file.argtypes = [C.c_char_p, Parameters]
L.llama_init_from_model.restype = C.c_void_p
L.llama_init_from_model.argtypes = [C.c_void_p, Parameters]
L.llama_model_get_vocab.restype = C.c_void_p
L.llama_model_get_vocab.argtypes = [C.c_void_p]
L.llama_get_logits_ith.restype = C.POINTER(C.c_float)
L.llama_get_logits_ith.argtypes = [C.c_void_p, C.c_int32]
L.llama_free.argtypes = [C.c_void_p]
L.llama_model_free.argtypes = [C.c_void_p]
for asked in ["llama_vocab_n_tokens", "llama_vocab_bos"]:
    getattr(L, asked).argtypes = [C.c_void_p]
L.llama_vocab_get_add_bos.restype = C.c_bool
L.llama_vocab_get_add_bos.argtypes = [C.c_void_p]
L.llama_vocab_is_eog.restype = C.c_bool
L.llama_vocab_is_eog.argtypes = [C.c_void_p, C.c_int32]
L.llama_tokenize.argtypes = [
    C.c_void_p, C.c_char_p, C.c_int32, C.POINTER(C.c_int32), C.c_int32, C.c_bool, C.c_bool,
]
L.ggml_quantize_chunk.restype = C.c_size_t
L.ggml_quantize_chunk.argtypes = [
    C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_void_p,
]


class Batch(C.Structure):
    _fields_ = [
        ("n_tokens", C.c_int32), ("token", C.c_void_p), ("embd", C.c_void_p), ("pos", C.c_void_p),
        ("n_seq_id", C.c_void_p), ("seq_id", C.c_void_p), ("logits", C.c_void_p),
    ]


L.llama_batch_get_one.restype = Batch
L.llama_batch_get_one.argtypes = [C.POINTER(C.c_int32), C.c_int32]
L.llama_decode.argtypes = [C.c_void_p, Batch]


def load(path):
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    assert model, path
    return model


def context(model):
    parameters = L.llama_context_default_params()
    numbers = (C.c_int32 * 256).from_buffer(parameters)
    # Keys and values in float32, and attention written out.
    places = [idx for idx in range(40) if numbers[idx] == 1 and numbers[idx + 1] == 1]
    assert places[-1:] == [26] and numbers[13] == -1, "the structure is another one in this version"
    numbers[26] = numbers[27] = 0
    numbers[13] = 0
    made = L.llama_init_from_model(model, parameters)
    assert made
    return made


def logprobs(model, tokens):
    """[n_tokens, n_vocab]; each token by itself, since only the last one's logits are kept of several."""
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    made, rows = context(model), []
    for token in tokens:
        one = (C.c_int32 * 1)(token)
        assert L.llama_decode(made, L.llama_batch_get_one(one, 1)) == 0
        logits = np.ctypeslib.as_array(L.llama_get_logits_ith(made, -1), (n_vocab,)).astype(np.float64)
        rows.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    L.llama_free(made)
    return np.array(rows)


def top(rows):
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :N_TOP]
    values = np.take_along_axis(rows, ids, axis=1)
    return {
        "top_ids": ids.tolist(),
        "top_logprobs": [[round(float(x), 5) for x in row] for row in values],
    }


def rewritten(path, out, convert):
    """A copy of a file whose tensors went through `convert(name, type, data) -> data, type`."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        data, kind = convert(tensor.name, tensor.tensor_type, tensor.data)
        # A byte shape is that of blocks; the writer takes it back to elements.
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_float32(name, kind, data):
    return gguf.quants.dequantize(data, kind).astype(np.float32), gguf.GGMLQuantizationType.F32


def quantised(rows, kind):
    """Rows of float32 through ggml's quantiser."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    n_bytes = gguf.quants.quant_shape_to_byte_shape(rows.shape, kind)
    out = np.zeros(n_bytes, dtype=np.uint8)
    n = L.ggml_quantize_chunk(int(kind), rows.ctypes.data, out.ctypes.data, 0, rows.shape[0], rows.shape[1], None)
    assert n == out.nbytes
    return out


def blocks():
    random = np.random.default_rng(7)
    types = {}
    for name in ["Q8_0", "Q4_0", "Q4_K", "Q6_K"]:
        kind = gguf.GGMLQuantizationType[name]
        values = random.standard_normal((3, 256)).astype(np.float32) * np.array([[0.02], [1.0], [300.0]], np.float32)
        written = quantised(values, kind)
        # Any bytes: also scales that no quantiser writes, an infinity or none among them.
        wild = random.integers(0, 256, (5, written.shape[1]), dtype=np.uint8)
        rows = np.concatenate([written, wild])
        with np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(rows, kind).astype("<f4")
        types[name] = {"bytes": rows.tobytes().hex(), "values": numbers.tobytes().hex()}
    return {"types": types}


def of_files(folder):
    types = {}
    for name in TYPES:
        path = os.path.join(folder, f"tiny-{name}.gguf")
        with tempfile.TemporaryDirectory() as scratch:
            plain = os.path.join(scratch, "plain.gguf")
            rewritten(path, plain, to_float32)
            exact, own = load(plain), load(path)
            types[name] = []
            for prompt in PROMPTS:
                rows = logprobs(exact, prompt)
                there = np.argsort(-rows, axis=1)[:, :N_TOP]
                theirs = np.abs(np.take_along_axis(rows - logprobs(own, prompt), there, axis=1))
                print(f"{name}: llama.cpp's own kernels differ by {theirs.max():.4f} at most, {theirs.mean():.4f} on average",
                      file=sys.stderr)
                types[name].append({"tokens": prompt, **top(rows)})
            L.llama_model_free(exact)
            L.llama_model_free(own)
    return {"types": types}


def of_texts(folder):
    vocabularies, names = {}, {}
    for file in sorted(os.listdir(folder)):
        if not file.startswith(("vocabulary-", "name-")):
            continue
        model = load(os.path.join(folder, file))
        vocab = L.llama_model_get_vocab(model)

        def encoded(text, parses):
            raw, out = text.encode(), (C.c_int32 * 4096)()
            n = L.llama_tokenize(vocab, raw, len(raw), out, 4096, False, parses)
            assert n >= 0
            return list(out[:n])

        kind, name = file.removesuffix(".gguf").split("-", 1)
        bos = L.llama_vocab_bos(vocab) if L.llama_vocab_get_add_bos(vocab) else None
        if kind == "name":
            names[name] = {"bos": bos, "tokens": encoded("\n".join(TEXTS), False)}
        else:
            ends = [token for token in range(L.llama_vocab_n_tokens(vocab)) if L.llama_vocab_is_eog(vocab, token)]
            texts = [{"parsed": encoded(text, True), "as_text": encoded(text, False)} for text in TEXTS]
            vocabularies[name] = {"bos": bos, "ends": ends, "texts": texts}
        L.llama_model_free(model)
    return {"texts": TEXTS, "vocabularies": vocabularies, "names": names}


def merges(wheel):
    """The first merges of Qwen's vocabulary, and those of all its tokens that TEXTS have somewhere, in its order: two tokens each,
    as GPT-2 writes bytes."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("dashscope/resources/qwen.tiktoken").splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    texts = "\n".join(TEXTS).encode()
    wanted = [token for token, rank in ranks.items() if rank < 256 + N_FIRST_MERGES or token in texts]
    made = {}
    while wanted:
        token = wanted.pop()
        if len(token) == 1 or token in made:
            continue
        parts = [token[idx:idx + 1] for idx in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[idx] + parts[idx + 1], len(ranks)) for idx in range(len(parts) - 1)]
            best = pairs.index(min(pairs))
            assert pairs[best] < ranks[token]
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        made[token] = parts
        wanted.extend(parts)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + idx) for idx, byte in enumerate(rest)}}
    for token in sorted(made, key=ranks.get):
        print(" ".join("".join(letters[byte] for byte in part) for part in made[token]))


def by_quantiser(folder):
    """`tiny` in each type by ggml's quantiser, from the file in f32, and how far llama.cpp is then from the original."""
    source = os.path.join(folder, "tiny-F32.gguf")
    original = [logprobs(load(source), prompt) for prompt in PROMPTS]
    for name in TYPES[3:]:
        kind = gguf.GGMLQuantizationType[name]

        def convert(tensor, stored, data):
            if len(data.shape) < 2:
                return data, gguf.GGMLQuantizationType.F32
            return quantised(data, kind), kind

        out = os.path.join(folder, f"quantised-{name}.gguf")
        rewritten(source, out, convert)
        plain = os.path.join(folder, f"quantised-{name}-plain.gguf")
        rewritten(out, plain, to_float32)
        exact = load(plain)
        report = []
        for prompt, rows in zip(PROMPTS, original):
            there = np.argsort(-rows, axis=1)[:, :N_TOP]
            mine = logprobs(exact, prompt)
            off = np.abs(np.take_along_axis(rows - mine, there, axis=1))
            print(f"{name}: {off.max():.4f} at most, {off.mean():.4f} on average from the original", file=sys.stderr)
            report.append({"tokens": prompt, **top(mine)})
        with open(os.path.join(folder, f"quantised-{name}.json"), "w") as file:
            json.dump(report, file)


def main():
    command, *arguments = sys.argv[1:]
    if command in ("quantised", "merges"):
        return {"quantised": by_quantiser, "merges": merges}[command](*arguments)
    made = {"blocks": blocks, "logprobs": of_files, "tokens": of_texts}[command](*arguments)
    versions = f"xllamacpp {xllamacpp.__version__}, gguf 0.19, numpy {np.__version__}"
    json.dump({"library": versions, **made}, sys.stdout, ensure_ascii=True)
    print()


main()
