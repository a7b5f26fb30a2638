//! Weights in safetensors files, or in one that `gguf` has read the header of: read by range and never mapped.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::tensor::Metadata;

use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
use super::error::ModelError;
use super::generated::Generated;
use super::gguf::{Encoding, RowOrder, Stored};
use super::source::{ModelSource, RangeFile};
use super::tensors;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Published headers are below 1 MiB.
const HEADER_BYTES_MAX: u64 = 16 << 20;
const INDEX_BYTES_MAX: u64 = 16 << 20;
const N_SHARDS_MAX: usize = 1024;

/// Bytes before the header: its length, little-endian.
const PREFIX_BYTES: u64 = 8;

/// Bytes that one conversion holds in memory besides its result.
const CHUNK_BYTES: usize = 256 << 10;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

/// What the header says about one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type that its elements are read in: that of the file, or f32 for quantised ones.
    pub dtype: Dtype,
    /// Lengths of the dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Length of its elements in that type.
    pub n_bytes: usize,
    shard_idx: usize,
    offset: u64,
    encoding: Encoding,
    rows: RowOrder,
}

/// The opened weights of a model.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, TensorInfo>,
}

#[derive(Debug)]
struct Shard {
    name: String,
    file: RangeFile,
    n_bytes: u64,
    header: blake3::Hash,
    /// Taken when it was opened, before anything of it was read.
    stamp: Vec<u8>,
}

impl Dtype {
    /// The name for people: `f32`, `f16` or `bf16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Length of one element.
    pub fn n_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl TensorInfo {
    /// A tensor of a file whose header is in another format.
    pub(super) fn stored(shape: Vec<usize>, n_elements: usize, stored: Stored) -> Self {
        let Stored { offset, encoding, rows } = stored;
        let dtype = encoding.read_dtype();
        Self { dtype, shape, n_bytes: n_elements * dtype.n_bytes(), shard_idx: 0, offset, encoding, rows }
    }

    /// How the file stores its elements: `f32`, `f16`, `bf16`, or the name of a type of blocks, such as `Q4_K`.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        self.encoding.name()
    }

    /// The type that it is loaded in unless another one is asked for.
    pub(super) fn loaded_dtype(&self) -> Dtype {
        self.encoding.loaded_dtype()
    }

    /// The product of the shape.
    pub fn n_elements(&self) -> usize {
        self.n_bytes / self.dtype.n_bytes()
    }

    /// Which file it is in, and where: read in this order, tensors come from each file front to back.
    pub fn place(&self) -> (usize, u64) {
        (self.shard_idx, self.offset)
    }
}

impl Checkpoint {
    /// One without weights.
    pub(crate) fn empty() -> Self {
        Self { name: String::new(), shards: Vec::new(), tensors: BTreeMap::new() }
    }

    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names, and checks headers,
    /// element types and file lengths. No weight is read.
    ///
    /// # Errors
    ///
    /// [`ModelError`] naming the file, and what it should have held.
    pub fn open(source: &ModelSource) -> Result<Self, ModelError> {
        let mut tensors = BTreeMap::new();
        if let Some((file, n_bytes)) = source.open(SINGLE_FILE)? {
            let name = source.describe(SINGLE_FILE);
            let shard = Shard::open(name.clone(), file, n_bytes, 0, &mut tensors, &[])?;
            return Ok(Self { name, shards: vec![shard], tensors });
        }
        let name = source.describe(INDEX_FILE);
        let Some(index) = source.read(INDEX_FILE, INDEX_BYTES_MAX)? else {
            return Err(ModelError::MissingFile {
                file: source.describe(SINGLE_FILE),
                expected: "model.safetensors, or model.safetensors.index.json with its shards",
            });
        };
        let places = parse_index(&name, &index)?;
        let files: BTreeSet<&str> = places.values().map(String::as_str).collect();
        if files.is_empty() || files.len() > N_SHARDS_MAX {
            return Err(ModelError::Field {
                file: name,
                field: "weight_map".into(),
                found: format!("{} files", files.len()),
                expected: format!("1 to {N_SHARDS_MAX} files"),
            });
        }
        let mut shards: Vec<Shard> = Vec::new();
        for file_name in files {
            let shard_name = source.describe(file_name);
            let Some((file, n_bytes)) = source.open(file_name)? else {
                return Err(ModelError::MissingFile {
                    file: shard_name,
                    expected: "every shard that model.safetensors.index.json names",
                });
            };
            let shard = Shard::open(shard_name, file, n_bytes, shards.len(), &mut tensors, &shards)?;
            for (tensor, _) in places.iter().filter(|(_, place)| *place == file_name) {
                if tensors.get(tensor).is_none_or(|info: &TensorInfo| info.shard_idx != shards.len()) {
                    return Err(ModelError::NotInShard {
                        index_file: name,
                        tensor: tensor.clone(),
                        shard_file: shard.name,
                    });
                }
            }
            shards.push(shard);
        }
        Ok(Self { name, shards, tensors })
    }

    /// The weights of one file whose header was read already.
    pub(super) fn of_file(
        name: &str,
        file: RangeFile,
        n_bytes: u64,
        header: blake3::Hash,
        stamp: Vec<u8>,
        all: impl Iterator<Item = (String, TensorInfo)>,
    ) -> Result<Self, ModelError> {
        let mut tensors = BTreeMap::new();
        for (tensor, info) in all {
            if tensors.insert(tensor.clone(), info).is_some() {
                let (first_file, second_file) = (name.to_owned(), name.to_owned());
                return Err(ModelError::DuplicateTensor { tensor, first_file, second_file });
            }
        }
        let shard = Shard { name: name.to_owned(), file, n_bytes, header, stamp };
        Ok(Self { name: name.to_owned(), shards: vec![shard], tensors })
    }

    /// Weights of one type for this config, from nowhere: 1 for the norms, small random values for all else.
    pub(crate) fn random(config: &ModelConfig, dtype: Dtype, seed: u64) -> Self {
        /// What every tensor starts at a multiple of: the longest element.
        const ALIGNMENT: u64 = 8;
        let shard = |name: &str, generated: Generated| Shard {
            name: name.to_owned(),
            file: RangeFile::Generated(generated),
            n_bytes: 0,
            header: blake3::hash(format!("{generated:?}").as_bytes()),
            stamp: Vec::new(),
        };
        let mut shards = vec![
            shard("random weights", Generated::Random { dtype, seed }),
            shard("norms", Generated::Ones { dtype }),
        ];
        let mut tensors = BTreeMap::new();
        for spec in tensors::expected(config) {
            let shard_idx = usize::from(spec.name.ends_with("norm.weight"));
            let n_bytes = spec.shape.iter().product::<usize>() * dtype.n_bytes();
            let offset = shards[shard_idx].n_bytes;
            shards[shard_idx].n_bytes = (offset + n_bytes as u64).next_multiple_of(ALIGNMENT);
            let info = TensorInfo {
                dtype,
                shape: spec.shape,
                n_bytes,
                shard_idx,
                offset,
                encoding: Encoding::Plain(dtype),
                rows: RowOrder::AsStored,
            };
            tensors.insert(spec.name, info);
        }
        Self { name: shards[0].name.clone(), shards, tensors }
    }

    /// The weights file, or the index of several.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is known of a tensor without reading it.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors, ordered by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Bytes of all of its files.
    #[must_use]
    pub fn n_file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.n_bytes).sum()
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, info: &TensorInfo) -> &str {
        &self.shards[info.shard_idx].name
    }

    /// Reads the bytes of a tensor's elements, little-endian, in the type of its [`TensorInfo`].
    ///
    /// # Errors
    ///
    /// [`ModelError::UnknownTensor`] for an unknown name, [`ModelError::Io`] when the file cannot be read.
    ///
    /// # Panics
    ///
    /// When `out` is not `n_bytes` long.
    pub fn read_bytes(&self, name: &str, out: &mut [u8]) -> Result<(), ModelError> {
        let info = self.lookup(name)?;
        assert_eq!(out.len(), info.n_bytes, "buffer for the bytes of {name}");
        self.read_range(info, 0, out)
    }

    /// As [`Self::read_bytes`], from byte `start` on, from as many threads as one likes.
    ///
    /// # Errors
    ///
    /// [`ModelError::UnknownTensor`] for an unknown name, [`ModelError::Io`] when the file cannot be read.
    ///
    /// # Panics
    ///
    /// When the range does not lie in the tensor.
    pub fn read_bytes_at(&self, name: &str, start: usize, out: &mut [u8]) -> Result<(), ModelError> {
        let info = self.lookup(name)?;
        let is_inside = start.checked_add(out.len()).is_some_and(|end| end <= info.n_bytes);
        assert!(is_inside, "{} bytes from {start} on of {name}, which has {}", out.len(), info.n_bytes);
        self.read_range(info, start as u64, out)
    }

    /// Reads a tensor and converts its elements to `f32`, which is exact for every [`Dtype`].
    ///
    /// # Errors
    ///
    /// [`ModelError::UnknownTensor`] for an unknown name, [`ModelError::Io`] when the file cannot be read.
    ///
    /// # Panics
    ///
    /// When `out` is not `n_elements()` long.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        let info = self.lookup(name)?;
        assert_eq!(out.len(), info.n_elements(), "buffer for the elements of {name}");
        let element_bytes = info.dtype.n_bytes();
        let mut bytes = vec![0; CHUNK_BYTES.min(info.n_bytes)];
        for (chunk_idx, elements) in out.chunks_mut(CHUNK_BYTES / element_bytes).enumerate() {
            let bytes = &mut bytes[..elements.len() * element_bytes];
            self.read_range(info, (chunk_idx * CHUNK_BYTES) as u64, bytes)?;
            convert(info.dtype, bytes, elements);
        }
        Ok(())
    }

    /// Feeds a hash with what tells these weights from others: headers, lengths, and the first bytes of every
    /// tensor, since models trained from one another share all but the values.
    pub(crate) fn fingerprint(&self, hasher: &mut blake3::Hasher) -> Result<(), ModelError> {
        const SAMPLE_BYTES: usize = 1 << 10;
        for shard in &self.shards {
            hasher.update(&shard.n_bytes.to_le_bytes());
            hasher.update(shard.header.as_bytes());
        }
        let mut sample = [0; SAMPLE_BYTES];
        for info in self.tensors.values() {
            let sample = &mut sample[..SAMPLE_BYTES.min(info.n_bytes)];
            self.read_range(info, 0, sample)?;
            hasher.update(sample);
        }
        Ok(())
    }

    /// Feeds a hash with what tells these weights from all others, to the last bit: what is compiled in as it is, and of files
    /// when they were changed.
    pub(crate) fn identify(&self, hasher: &mut blake3::Hasher) {
        for shard in &self.shards {
            hasher.update(shard.header.as_bytes());
            match &shard.file {
                RangeFile::Memory(bytes) => hasher.update(bytes),
                RangeFile::Disk(_) | RangeFile::Generated(_) => hasher.update(&shard.stamp),
            };
        }
    }

    fn lookup(&self, name: &str) -> Result<&TensorInfo, ModelError> {
        self.tensors
            .get(name)
            .ok_or_else(|| ModelError::UnknownTensor { file: self.name.clone(), tensor: name.to_owned() })
    }

    fn read_range(&self, info: &TensorInfo, start: u64, out: &mut [u8]) -> Result<(), ModelError> {
        let shard = &self.shards[info.shard_idx];
        let stored = Stored { offset: info.offset, encoding: info.encoding, rows: info.rows };
        stored
            .read(&shard.file, start, out)
            .map_err(|source| ModelError::Io { file: shard.name.clone(), source })
    }
}

impl Shard {
    /// Reads the header and adds its tensors to `tensors`.
    fn open(
        name: String,
        file: RangeFile,
        found_bytes: u64,
        shard_idx: usize,
        tensors: &mut BTreeMap<String, TensorInfo>,
        earlier: &[Shard],
    ) -> Result<Self, ModelError> {
        let short =
            |expected_bytes| ModelError::FileLength { file: name.clone(), expected_bytes, found_bytes };
        let io = |source| ModelError::Io { file: name.clone(), source };
        let stamp = file.stamp().map_err(io)?;
        if found_bytes < PREFIX_BYTES {
            return Err(short(PREFIX_BYTES));
        }
        let mut prefix = [0; PREFIX_BYTES as usize];
        file.read_exact_at(&mut prefix, 0).map_err(io)?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > HEADER_BYTES_MAX {
            let reason = format!("{header_bytes} bytes long; expected at most {HEADER_BYTES_MAX}");
            return Err(ModelError::Header { file: name, reason });
        }
        let data_offset = PREFIX_BYTES + header_bytes;
        if found_bytes < data_offset {
            return Err(short(data_offset));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, PREFIX_BYTES).map_err(io)?;
        // Deserialisation checks that the ranges follow each other without a gap and match shape and dtype.
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| ModelError::Header { file: name.clone(), reason: error.to_string() })?;
        let expected_bytes = data_offset.saturating_add(metadata.data_len() as u64);
        if found_bytes != expected_bytes {
            return Err(short(expected_bytes));
        }
        for (tensor, info) in metadata.tensors() {
            let dtype = match info.dtype {
                safetensors::Dtype::F32 => Dtype::F32,
                safetensors::Dtype::F16 => Dtype::F16,
                safetensors::Dtype::BF16 => Dtype::Bf16,
                other => {
                    return Err(ModelError::TensorDtype {
                        file: name,
                        tensor,
                        found: other.to_string(),
                        expected: "F32, F16 or BF16",
                    });
                }
            };
            let (start, end) = info.data_offsets;
            let info = TensorInfo {
                dtype,
                shape: info.shape.clone(),
                n_bytes: end - start,
                shard_idx,
                offset: data_offset + start as u64,
                encoding: Encoding::Plain(dtype),
                rows: RowOrder::AsStored,
            };
            if let Some(other) = tensors.insert(tensor.clone(), info) {
                let first_file = earlier[other.shard_idx].name.clone();
                return Err(ModelError::DuplicateTensor { tensor, first_file, second_file: name });
            }
        }
        let header = blake3::hash(&header);
        Ok(Self { name, file, n_bytes: found_bytes, header, stamp })
    }
}

/// `weight_map` of an index: tensor to file name.
fn parse_index(file: &str, bytes: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(bytes)
        .map_err(|error| ModelError::Syntax { file: file.to_owned(), reason: error.to_string() })?;
    for (tensor, place) in &index.weight_map {
        // A model folder never reaches outside itself.
        if place.is_empty() || place.starts_with('.') || place.contains(['/', '\\', ':', '\0']) {
            return Err(ModelError::Field {
                file: file.to_owned(),
                field: format!("weight_map.{tensor}"),
                found: format!("{place:?}"),
                expected: "the name of a file in the same folder".into(),
            });
        }
    }
    Ok(index.weight_map)
}

fn convert(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let pairs = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    match dtype {
        Dtype::F32 => {
            for (out, four) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            }
        }
        Dtype::F16 => {
            for (out, bits) in out.iter_mut().zip(pairs) {
                *out = half::f16::from_bits(bits).to_f32();
            }
        }
        Dtype::Bf16 => {
            for (out, bits) in out.iter_mut().zip(pairs) {
                *out = f32::from_bits(u32::from(bits) << 16);
            }
        }
    }
}
