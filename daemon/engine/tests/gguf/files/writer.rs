//! The layout of a GGUF file, version 3.

const ALIGNMENT: usize = 32;

/// A value of the metadata.
#[derive(Clone, Debug)]
pub enum Meta {
    /// An unsigned number.
    U32(u32),
    /// A number.
    F32(f32),
    /// Yes or no.
    Flag(bool),
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Signed numbers.
    I32s(Vec<i32>),
    /// Numbers.
    F32s(Vec<f32>),
}

/// A file that is being made.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    keys: Vec<(String, Meta)>,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    /// Slowest first.
    shape: Vec<usize>,
    type_id: u32,
    bytes: Vec<u8>,
}

impl Gguf {
    /// Sets a key, which may be there already.
    pub fn set(&mut self, key: &str, value: Meta) {
        self.remove(key);
        self.keys.push((key.to_owned(), value));
    }

    /// Takes a key away.
    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(known, _)| known != key);
    }

    /// Adds a tensor of these bytes, in the type that `ggml_type` has this number for.
    pub fn add(&mut self, name: &str, shape: &[usize], type_id: u32, bytes: Vec<u8>) {
        self.tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), type_id, bytes });
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            text(&mut out, key);
            meta(&mut out, value);
        }
        let mut offset = 0_usize;
        for Tensor { name, shape, type_id, bytes } in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            for length in shape.iter().rev() {
                out.extend((*length as u64).to_le_bytes());
            }
            out.extend(type_id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes.len()).next_multiple_of(ALIGNMENT);
        }
        for Tensor { bytes, .. } in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(bytes);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn meta(out: &mut Vec<u8>, value: &Meta) {
    let list = |out: &mut Vec<u8>, type_id: u32, len: usize| {
        out.extend(9_u32.to_le_bytes());
        out.extend(type_id.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    let id = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
    match value {
        Meta::U32(value) => {
            id(out, 4);
            out.extend(value.to_le_bytes());
        }
        Meta::F32(value) => {
            id(out, 6);
            out.extend(value.to_le_bytes());
        }
        Meta::Flag(value) => {
            id(out, 7);
            out.push(u8::from(*value));
        }
        Meta::Text(value) => {
            id(out, 8);
            text(out, value);
        }
        Meta::Texts(values) => {
            list(out, 8, values.len());
            values.iter().for_each(|value| text(out, value));
        }
        Meta::I32s(values) => {
            list(out, 5, values.len());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        Meta::F32s(values) => {
            list(out, 6, values.len());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }
}
