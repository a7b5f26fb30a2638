//! Headers of weights: whatever they say, nothing outside of the file is read, and what is read is what they say.

use arbitrary::{Result, Unstructured};
use serde_json::{Map, Value, json};
use trellis_engine::model::{Checkpoint, ModelSource};

use crate::folder::{Draft, with_files};
use crate::json;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["a.safetensors", "b.safetensors"];

/// The longest data that is made for a header.
const DATA_BYTES_MAX: u64 = 1 << 20;

/// Words that mean something in a header or an index.
const WORDS: [&str; 14] = [
    "dtype",
    "shape",
    "data_offsets",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "I64",
    "BOOL",
    "__metadata__",
    "weight_map",
    "a.safetensors",
    "../a.safetensors",
    "x",
];

/// Opens weights of these bytes: as a file, as a header with data as long as it says, as a header with changes, or as an
/// index of two files.
///
/// # Panics
/// A tensor is not where the header says, or not as long.
pub fn check(input: &[u8]) {
    let Some((&kind, bytes)) = input.split_first() else { return };
    match kind % 4 {
        0 => single(bytes),
        1 => single(&file_of(bytes)),
        2 => {
            let header = json::changed(&header(), &WORDS, &mut Unstructured::new(bytes));
            single(&file_of(header.expect("zeros make a header").to_string().as_bytes()));
        }
        _ => shards(bytes),
    }
}

/// Three tensors, one of each type.
fn header() -> Value {
    json!({
        "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "y": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
        "z": {"dtype": "BF16", "shape": [1, 2, 2], "data_offsets": [32, 40]},
        "__metadata__": {"format": "pt"},
    })
}

/// A file with this header, and with as much data as its offsets name.
fn file_of(header: &[u8]) -> Vec<u8> {
    let end_of = |value: &Value| value["data_offsets"][1].as_u64();
    let parsed: Map<String, Value> = serde_json::from_slice(header).unwrap_or_default();
    let n_bytes = parsed.values().filter_map(end_of).max().unwrap_or(0).min(DATA_BYTES_MAX);
    let data = (0..n_bytes).map(|idx| (idx * 37) as u8);
    (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(data).collect()
}

fn single(bytes: &[u8]) {
    with_files(&[Draft { name: SINGLE, bytes }], |folder| {
        let source = ModelSource::Folder(folder.to_owned());
        match Checkpoint::open(&source) {
            Ok(checkpoint) => is_as_it_says(&checkpoint, bytes),
            Err(error) => assert!(error.to_string().contains(SINGLE), "{error}"),
        }
    });
}

/// Holds what was opened against a reading of the header of one's own.
fn is_as_it_says(checkpoint: &Checkpoint, bytes: &[u8]) {
    let (length, rest) = bytes.split_at(8);
    let n_header = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at(n_header);
    let header: Map<String, Value> = serde_json::from_slice(header).expect("it was opened");
    let mut n_covered = 0;
    for (name, info) in checkpoint.tensors() {
        let said = &header[name];
        let offset = |idx: usize| said["data_offsets"][idx].as_u64().expect("a number") as usize;
        let expected = &data[offset(0)..offset(1)];
        let product: usize = info.shape.iter().product();
        assert_eq!((product, info.n_bytes), (info.n_elements(), expected.len()), "{name}");
        let mut read = vec![0; info.n_bytes];
        checkpoint.read_bytes(name, &mut read).expect("it lies in the file");
        assert!(read == expected, "{name}");
        let mut numbers = vec![0.0; info.n_elements()];
        checkpoint.read_f32(name, &mut numbers).expect("it lies in the file");
        n_covered += info.n_bytes;
    }
    assert_eq!(n_covered, data.len(), "the tensors are all of the data");
}

/// An index over two files, each with a tensor of its own.
fn shards(bytes: &[u8]) {
    let of = |name: &str| json!({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).to_string();
    let files = [file_of(of("x").as_bytes()), file_of(of("y").as_bytes())];
    let index = match bytes.split_first() {
        Some((0, bytes)) => bytes.to_vec(),
        _ => changed_index(&mut Unstructured::new(bytes)).expect("zeros make an index"),
    };
    let drafts = [
        Draft { name: INDEX, bytes: &index },
        Draft { name: SHARDS[0], bytes: &files[0] },
        Draft { name: SHARDS[1], bytes: &files[1] },
    ];
    with_files(&drafts, |folder| match Checkpoint::open(&ModelSource::Folder(folder.to_owned())) {
        Ok(checkpoint) => {
            for (name, info) in checkpoint.tensors() {
                assert!(SHARDS.iter().any(|shard| checkpoint.file_of(info).ends_with(shard)), "{name}");
                checkpoint.read_f32(name, &mut [0.0; 2]).expect("it lies in the file");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    });
}

fn changed_index(bytes: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let base = json!({"metadata": {"total_size": 16}, "weight_map": {"x": SHARDS[0], "y": SHARDS[1]}});
    Ok(json::changed(&base, &WORDS, bytes)?.to_string().into_bytes())
}
