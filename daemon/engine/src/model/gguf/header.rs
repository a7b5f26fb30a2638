//! The header of a GGUF file, version 2 or 3: keys with values, and where each tensor is. Layout: `docs/gguf.md` of
//! ggml-org/ggml.
//!
//! No number in it is believed: texts and arrays have to lie in the bytes that are there, and there are bounds for keys, tensors
//! and what of a list becomes a field. Lists stay as they are stored: a header takes no more memory than the bytes that it has.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Number, Value as Json};

const MAGIC: &[u8; 4] = b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// Files that are published have less than a hundred.
const N_KEYS_MAX: u64 = 1 << 10;
const N_TENSORS_MAX: u64 = 1 << 16;
/// As in ggml.
const N_DIMENSIONS_MAX: u32 = 4;
/// As in the format's definition.
const KEY_BYTES_MAX: usize = (1 << 16) - 1;
const TENSOR_NAME_BYTES_MAX: usize = 64;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

/// The longest list of numbers that is shown in errors and read as a field: one entry for each layer.
const N_FIELD_ENTRIES_MAX: usize = 1024;

/// What errors show of a text.
const N_SHOWN_CHARS: usize = 40;

/// What a header says.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    pub(super) values: BTreeMap<&'a str, Value<'a>>,
    /// In the order of the file.
    pub(super) tensors: Vec<Tensor<'a>>,
    /// Length of the header.
    pub(super) n_bytes: usize,
    /// Where the data of tensors begins, and what each tensor begins at a multiple of.
    pub(super) data_offset: u64,
    pub(super) alignment: u64,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Number(Number),
    /// An infinity, or none.
    NoNumber(f64),
    Flag(bool),
    Text(&'a str),
    Texts(Texts<'a>),
    Numbers(Numbers<'a>),
}

/// A list of texts, as it is stored: each with its length before it, and looked at already.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Texts<'a> {
    n: usize,
    bytes: &'a [u8],
}

/// A list of numbers, as it is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Numbers<'a> {
    kind: Kind,
    bytes: &'a [u8],
}

/// A tensor, as the header has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor<'a> {
    pub(super) name: &'a str,
    /// Lengths of the dimensions, slowest first: the file has them the other way round.
    pub(super) shape: Vec<usize>,
    pub(super) n_elements: u64,
    /// The number of its `ggml_type`.
    pub(super) type_id: u32,
    /// From where the data begins.
    pub(super) offset: u64,
}

/// Why bytes are no header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderError {
    /// It goes on behind the bytes that are there.
    Ends,
    /// It is none, whatever follows.
    Broken(String),
}

/// Types of numbers and flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Flag,
    U64,
    I64,
    F64,
}

const TEXT: u32 = 8;
const ARRAY: u32 = 9;

impl Kind {
    fn of(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Flag,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    fn n_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Flag => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// A value of this type, of exactly as many bytes.
    fn value(self, bytes: &[u8]) -> Value<'static> {
        let mut low = [0; 8];
        low[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(low);
        let float = |value: f64| Number::from_f64(value).map_or(Value::NoNumber(value), Value::Number);
        let signed = |value: i64| Value::Number(value.into());
        match self {
            Self::Flag => Value::Flag(unsigned != 0),
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Value::Number(unsigned.into()),
            Self::I8 => signed(i64::from(unsigned as i8)),
            Self::I16 => signed(i64::from(unsigned as i16)),
            Self::I32 => signed(i64::from(unsigned as i32)),
            Self::I64 => signed(unsigned as i64),
            Self::F32 => float(f64::from(f32::from_bits(unsigned as u32))),
            Self::F64 => float(f64::from_bits(unsigned)),
        }
    }
}

impl<'a> Texts<'a> {
    pub(super) fn len(&self) -> usize {
        self.n
    }

    /// Bytes of all of them and of their lengths.
    pub(super) fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut input = Input { bytes: self.bytes, n_read: 0 };
        (0..self.n).map(move |_| input.text().expect("it was read before"))
    }
}

impl<'a> Numbers<'a> {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.kind.n_bytes()
    }

    /// Its entries as numbers; a flag is none.
    pub(super) fn iter(&self) -> impl Iterator<Item = Option<Number>> + use<'a> {
        let kind = self.kind;
        self.bytes.chunks_exact(kind.n_bytes()).map(move |bytes| match kind.value(bytes) {
            Value::Number(number) => Some(number),
            _ => None,
        })
    }
}

impl<'a> Header<'a> {
    /// Reads the header at the start of a file.
    ///
    /// # Errors
    /// [`HeaderError`]
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, HeaderError> {
        let mut input = Input { bytes, n_read: 0 };
        if input.take(4)? != MAGIC {
            return Err(HeaderError::Broken("it does not begin with GGUF".into()));
        }
        let version = input.u32()?;
        if !VERSIONS.contains(&version) {
            let is_swapped = VERSIONS.contains(&version.swap_bytes());
            let what = if is_swapped { "big-endian".to_owned() } else { format!("version {version}") };
            return Err(HeaderError::Broken(format!("{what}; expected version 2 or 3, little-endian")));
        }
        let n_tensors = input.count("tensors", N_TENSORS_MAX)?;
        let n_keys = input.count("keys", N_KEYS_MAX)?;
        let mut values = BTreeMap::new();
        for _ in 0..n_keys {
            let key = input.name("key", KEY_BYTES_MAX)?;
            let value = input.value(key)?;
            if values.insert(key, value).is_some() {
                return Err(HeaderError::Broken(format!("key {:?} is there twice", shortened(key))));
            }
        }
        let tensors = (0..n_tensors).map(|_| input.tensor()).collect::<Result<Vec<_>, _>>()?;
        let mut names = HashSet::with_capacity(tensors.len());
        if let Some(twice) = tensors.iter().find(|tensor| !names.insert(tensor.name)) {
            return Err(HeaderError::Broken(format!("tensor {:?} is there twice", twice.name)));
        }
        let alignment = match values.get("general.alignment") {
            None => ALIGNMENT_DEFAULT,
            Some(Value::Number(number)) => number
                .as_u64()
                .filter(|bytes| bytes.is_power_of_two() && *bytes <= ALIGNMENT_MAX)
                .ok_or_else(|| HeaderError::Broken(format!("general.alignment is {number}")))?,
            Some(_) => return Err(HeaderError::Broken("general.alignment is no number".into())),
        };
        let n_bytes = input.n_read;
        let data_offset = (n_bytes as u64).next_multiple_of(alignment);
        Ok(Self { values, tensors, n_bytes, data_offset, alignment })
    }

    /// The metadata as the fields of an object. Lists that are longer than one of layers are left out of it.
    pub(super) fn fields(&self) -> Map<String, Json> {
        let json = |value: &Value| match value {
            Value::Number(number) => Json::Number(number.clone()),
            Value::NoNumber(number) => Json::String(number.to_string()),
            Value::Flag(flag) => Json::Bool(*flag),
            Value::Text(text) => Json::String((*text).to_owned()),
            Value::Texts(texts) => Json::String(format!("a list of {} texts", texts.len())),
            Value::Numbers(numbers) if numbers.len() > N_FIELD_ENTRIES_MAX => {
                Json::String(format!("a list of {} numbers", numbers.len()))
            }
            Value::Numbers(numbers) => {
                Json::Array(numbers.iter().map(|number| number.map_or(Json::Null, Json::Number)).collect())
            }
        };
        self.values.iter().map(|(key, value)| ((*key).to_owned(), json(value))).collect()
    }
}

/// Bytes of which some are read.
struct Input<'a> {
    bytes: &'a [u8],
    n_read: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8], HeaderError> {
        let end = self.n_read.checked_add(n_bytes).ok_or(HeaderError::Ends)?;
        let taken = self.bytes.get(self.n_read..end).ok_or(HeaderError::Ends)?;
        self.n_read = end;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes")))
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64, HeaderError> {
        match self.u64()? {
            n if n <= most => Ok(n),
            n => Err(HeaderError::Broken(format!("{n} {what}; expected at most {most}"))),
        }
    }

    fn text(&mut self) -> Result<&'a str, HeaderError> {
        let n_bytes = usize::try_from(self.u64()?).map_err(|_| HeaderError::Ends)?;
        let at = self.n_read;
        std::str::from_utf8(self.take(n_bytes)?)
            .map_err(|_| HeaderError::Broken(format!("the text at byte {at} is not UTF-8")))
    }

    /// A text that errors repeat.
    fn name(&mut self, what: &str, most: usize) -> Result<&'a str, HeaderError> {
        let name = self.text()?;
        if name.len() > most {
            let (name, n_bytes) = (shortened(name), name.len());
            let reason =
                format!("the {what} that begins with {name:?} has {n_bytes} bytes; expected at most {most}");
            return Err(HeaderError::Broken(reason));
        }
        Ok(name)
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, HeaderError> {
        let unknown = |id| {
            let key = shortened(key);
            HeaderError::Broken(format!("key {key:?} has a value of an unknown type {id}"))
        };
        match self.u32()? {
            TEXT => Ok(Value::Text(self.text()?)),
            ARRAY => match (self.u32()?, self.u64()?) {
                (TEXT, n) => {
                    let n = usize::try_from(n).map_err(|_| HeaderError::Ends)?;
                    let start = self.n_read;
                    (0..n).try_for_each(|_| self.text().map(drop))?;
                    Ok(Value::Texts(Texts { n, bytes: &self.bytes[start..self.n_read] }))
                }
                (id, n) => {
                    let kind = Kind::of(id).ok_or_else(|| unknown(id))?;
                    let n_bytes = usize::try_from(n).ok().and_then(|n| n.checked_mul(kind.n_bytes()));
                    let bytes = self.take(n_bytes.ok_or(HeaderError::Ends)?)?;
                    Ok(Value::Numbers(Numbers { kind, bytes }))
                }
            },
            id => {
                let kind = Kind::of(id).ok_or_else(|| unknown(id))?;
                Ok(kind.value(self.take(kind.n_bytes())?))
            }
        }
    }

    fn tensor(&mut self) -> Result<Tensor<'a>, HeaderError> {
        let name = self.name("tensor", TENSOR_NAME_BYTES_MAX)?;
        let n_dimensions = self.u32()?;
        if n_dimensions > N_DIMENSIONS_MAX {
            let reason =
                format!("tensor {name:?} has {n_dimensions} dimensions; expected at most {N_DIMENSIONS_MAX}");
            return Err(HeaderError::Broken(reason));
        }
        let lengths = (0..n_dimensions).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        let too_large = || HeaderError::Broken(format!("tensor {name:?} has dimensions {lengths:?}"));
        // Bytes are counted in eight at most for each element.
        let n_elements = lengths.iter().try_fold(1_u64, |product, length| product.checked_mul(*length));
        let n_elements = n_elements.filter(|n| *n <= i64::MAX as u64 / 8).ok_or_else(too_large)?;
        let shape = lengths.iter().rev().map(|length| usize::try_from(*length)).collect::<Result<_, _>>();
        let shape = shape.map_err(|_| too_large())?;
        Ok(Tensor { name, shape, n_elements, type_id: self.u32()?, offset: self.u64()? })
    }
}

/// The beginning of a text, for errors.
pub(super) fn shortened(text: &str) -> String {
    text.chars().take(N_SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    /// A header with this metadata and one tensor `[3, 2]`.
    fn header(n_keys: u64, keys: &[u8]) -> Vec<u8> {
        let mut bytes =
            [MAGIC.as_slice(), &3_u32.to_le_bytes(), &1_u64.to_le_bytes(), &n_keys.to_le_bytes()].concat();
        bytes.extend(keys);
        bytes.extend(text("x"));
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend([2_u64, 3].map(u64::to_le_bytes).concat());
        bytes.extend(8_u32.to_le_bytes());
        bytes.extend(64_u64.to_le_bytes());
        bytes
    }

    #[test]
    fn values_of_each_kind_and_a_tensor_are_read() {
        let mut keys = Vec::new();
        let mut add = |key: &str, id: u32, value: &[u8]| {
            keys.extend(text(key));
            keys.extend(id.to_le_bytes());
            keys.extend(value);
        };
        add("byte", 1, &[0xff]);
        add("count", 4, &7_u32.to_le_bytes());
        add("eps", 6, &0.5_f32.to_le_bytes());
        add("flag", 7, &[1]);
        add("nan", 12, &f64::NAN.to_le_bytes());
        add("text", TEXT, &text("é"));
        add("list", ARRAY, &[&TEXT.to_le_bytes()[..], &2_u64.to_le_bytes(), &text("a"), &text("")].concat());
        add(
            "numbers",
            ARRAY,
            &[&5_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &(-1_i32).to_le_bytes(), &[4, 0, 0, 0]]
                .concat(),
        );
        let bytes = header(8, &keys);
        let header = Header::parse(&bytes).expect("a header");
        assert_eq!(header.n_bytes, bytes.len());
        assert_eq!((header.alignment, header.data_offset % 32), (32, 0));
        assert_eq!(
            Json::Object(header.fields()),
            serde_json::json!({"byte": -1, "count": 7, "eps": 0.5, "flag": true, "nan": "NaN", "text": "é",
                "list": "a list of 2 texts", "numbers": [-1, 4]})
        );
        let tensor = Tensor { name: "x", shape: vec![3, 2], n_elements: 6, type_id: 8, offset: 64 };
        assert_eq!(header.tensors, [tensor]);
        for n in 0..bytes.len() {
            assert_eq!(Header::parse(&bytes[..n]).expect_err("it is cut"), HeaderError::Ends, "{n}");
        }
    }

    #[test]
    fn what_is_no_header_is_told_so() {
        let broken = |bytes: &[u8]| match Header::parse(bytes) {
            Err(HeaderError::Broken(reason)) => reason,
            other => panic!("{other:?}"),
        };
        assert!(broken(b"GGML....").contains("GGUF"));
        assert!(broken(&[&b"GGUF"[..], &1_u32.to_le_bytes()].concat()).contains("version 1"));
        assert!(broken(&[&b"GGUF"[..], &3_u32.to_be_bytes()].concat()).contains("big-endian"));
        assert!(
            broken(&[&b"GGUF"[..], &3_u32.to_le_bytes(), &u64::MAX.to_le_bytes()].concat())
                .contains("tensors")
        );
        let key = |value: &[u8]| header(1, &[text("k"), value.to_vec()].concat());
        assert!(broken(&key(&13_u32.to_le_bytes())).contains("unknown type 13"));
        let nested = [&ARRAY.to_le_bytes()[..], &ARRAY.to_le_bytes(), &1_u64.to_le_bytes()].concat();
        assert!(broken(&key(&nested)).contains("unknown type 9"));
        let endless = [&ARRAY.to_le_bytes()[..], &TEXT.to_le_bytes(), &u64::MAX.to_le_bytes()].concat();
        assert_eq!(Header::parse(&key(&endless)).expect_err("it ends"), HeaderError::Ends);
        let twice = [text("k"), vec![0, 0, 0, 0, 1]].concat().repeat(2);
        assert!(broken(&header(2, &twice)).contains("twice"));
        let long = [text(&"k".repeat(KEY_BYTES_MAX + 1)), vec![0, 0, 0, 0, 1]].concat();
        let reason = broken(&header(1, &long));
        assert!(reason.contains("65536 bytes; expected at most 65535") && reason.len() < 200, "{reason}");
        let named = |name: &str| [text(name), 0_u32.to_le_bytes().repeat(4)].concat();
        let tensors = |names: [&str; 2]| {
            let counts = [2_u64, 0].map(u64::to_le_bytes).concat();
            [&b"GGUF"[..], &3_u32.to_le_bytes(), &counts, &names.map(named).concat()].concat()
        };
        assert!(broken(&tensors(["x", "x"])).contains("tensor \"x\" is there twice"));
        assert!(broken(&tensors(["x", &"y".repeat(65)])).contains("65 bytes; expected at most 64"));
    }

    #[test]
    fn a_list_of_texts_is_read_where_it_lies() {
        let n_texts = 1 << 16;
        let list = [&ARRAY.to_le_bytes()[..], &TEXT.to_le_bytes(), &(n_texts as u64).to_le_bytes()].concat();
        let bytes = header(1, &[text("k"), list, text("ab").repeat(n_texts)].concat());
        let header = Header::parse(&bytes).expect("a header");
        let Value::Texts(texts) = header.values["k"] else { panic!("{:?}", header.values["k"]) };
        assert_eq!((texts.len(), texts.n_bytes()), (n_texts, 10 * n_texts));
        assert!(texts.iter().count() == n_texts && texts.iter().all(|text| text == "ab"));
        let place = texts.bytes.as_ptr_range();
        assert!(bytes.as_ptr_range().contains(&place.start), "nothing is made of it");
    }
}
